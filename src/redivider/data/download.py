"""Downloads: whole and with the right checksum, or not at all."""

import hashlib
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from redivider.data.errors import DataError, reason, require
from redivider.data.files import VARIABLE, beside

CHUNK = 1 << 20


def download(url: str, path: Path, *, md5: str, timeout: float = 30) -> None:
    """Fetch a file under a progress bar; it appears at `path` when it is complete.

    Args:
        url: Where it is.
        path: Where it goes; its folder is made.
        md5: Its checksum, as its publisher gives it.
        timeout: Seconds without an answer after which to give up.
    """
    instead = (
        f"put {path.name} into {path.parent}, or take a folder that has it, by {VARIABLE} or "
        "--data-folder"
    )
    try:
        with beside(path) as part:
            try:
                _fetch(url, part, md5=md5, timeout=timeout)
            except _Failed as error:
                raise DataError(f"cannot download {url} ({reason(error)}); {instead}") from None
    except OSError as error:
        raise DataError(
            f"cannot write {path.name} to {path.parent} ({reason(error)}); "
            f"make room there, or take another folder, by {VARIABLE} or --data-folder"
        ) from None


class _Failed(Exception):
    """It did not come, or not as it should."""


def _fetch(url: str, path: Path, *, md5: str, timeout: float) -> None:
    tqdm = require("tqdm", "a download").tqdm
    try:
        response = urlopen(url, timeout=timeout)
    except HTTPError as error:
        with error:  # it holds the connection
            raise _Failed(reason(error)) from None
    except (OSError, HTTPException) as error:
        raise _Failed(reason(error)) from None
    found = hashlib.md5(usedforsecurity=False)
    size = int(response.headers.get("Content-Length") or 0)
    path.parent.mkdir(parents=True, exist_ok=True)  # not for a name that was mistyped
    bar = tqdm(total=size or None, desc=path.name, unit="B", unit_scale=True, leave=False)
    with response, bar, path.open("wb") as file:
        while chunk := _read(response):
            file.write(chunk)
            found.update(chunk)
            bar.update(len(chunk))
        if file.tell() < size:
            raise _Failed(f"it ended after {file.tell():,} of {size:,} bytes")
    if found.hexdigest() != md5:
        raise _Failed(f"its md5 is {found.hexdigest()}, not {md5}")


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, HTTPException) as error:
        raise _Failed(reason(error)) from None
