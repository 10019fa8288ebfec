"""Files of data sets: search folders, reading from folders and archives, atomic writing."""

import gzip
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

from redivider.data.errors import DataError, reason

VARIABLE = "REDIVIDER_DATA"
DAMAGES = (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, RuntimeError)

Contents = Iterator[tuple[str, bytes]]


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder, or else $REDIVIDER_DATA, or else ~/.cache/redivider."""
    return Path(folder or os.environ.get(VARIABLE) or "~/.cache/redivider").expanduser()


def search_folders(folder: str | Path | None, name: str) -> tuple[Path, Path]:
    """Return the folders to search for a data set: the folder itself, and `name` inside it."""
    root = data_folder(folder)
    return root, root / name


def read_files(path: Path, names: Collection[str], *, advice: str) -> Contents:
    """Yield names and contents of files in a folder, a .tar.gz or a .zip, without unpacking it.

    The order is arbitrary. Archives are read to their end, so that their checksums are verified.

    Args:
        path: Folder or archive.
        names: Names of the files, without the folders inside an archive.
        advice: Remedy to append to errors.
    """
    read = _read_folder if path.is_dir() else _read_zip if path.suffix == ".zip" else _read_tar
    missing = set(names)
    try:
        for name, content in read(path, missing.__contains__):
            missing.discard(name)
            yield name, content
    except DAMAGES as error:
        raise DataError(f"{path} is damaged or cut short ({reason(error)}); {advice}") from None
    if missing:
        raise DataError(f"{path} has no file {min(missing)}; {advice}")


def _read_folder(folder: Path, is_wanted: Callable[[str], bool]) -> Contents:
    for path in sorted(folder.iterdir()):
        if is_wanted(path.name):
            yield path.name, path.read_bytes()


def _read_tar(path: Path, is_wanted: Callable[[str], bool]) -> Contents:
    with gzip.open(path) as unzipped:
        with tarfile.open(fileobj=unzipped, mode="r|") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if member.isfile() and is_wanted(name):
                    content = tar.extractfile(member)
                    assert content is not None
                    yield name, content.read()
        while unzipped.read(1 << 20):
            pass  # gzip verifies its checksum only at the end


def _read_zip(path: Path, is_wanted: Callable[[str], bool]) -> Contents:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = PurePosixPath(member.filename).name
            if is_wanted(name):
                yield name, archive.read(member)
