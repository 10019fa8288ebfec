"""Downloads with a checksum: a file is complete, or it does not appear."""

import hashlib
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from redivider.data.errors import DataError, reason, require
from redivider.data.files import VARIABLE
from redivider.files import atomic_write

CHUNK = 1 << 20


def download(url: str, path: Path, *, md5: str, timeout: float = 30) -> None:
    """Download a file with a progress bar; it appears at `path` when it is complete.

    Args:
        url: Address of the file.
        path: Destination; its folder is created.
        md5: Checksum that its publisher lists.
        timeout: Seconds to wait for an answer.
    """
    try:
        with atomic_write(path) as partial:
            _fetch(url, partial, md5=md5, timeout=timeout)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # its connection
        raise DataError(
            f"cannot download {url} ({reason(error)}); put {path.name} into {path.parent}, or take "
            f"a folder that has it, or has room for it, by {VARIABLE} or --data-folder"
        ) from None


def _fetch(url: str, path: Path, *, md5: str, timeout: float) -> None:
    tqdm = require("tqdm", "a download").tqdm
    response = urlopen(url, timeout=timeout)
    digest = hashlib.md5(usedforsecurity=False)
    size = int(response.headers.get("Content-Length") or 0)
    path.parent.mkdir(parents=True, exist_ok=True)  # only now, when the URL has answered
    bar = tqdm(total=size or None, desc=path.name, unit="B", unit_scale=True, leave=False)
    with response, bar, path.open("wb") as file:
        while chunk := response.read(CHUNK):
            file.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
        if file.tell() < size:
            raise OSError(f"it ended after {file.tell():,} of {size:,} bytes")
    if digest.hexdigest() != md5:
        raise OSError(f"its md5 is {digest.hexdigest()}, not {md5}")
