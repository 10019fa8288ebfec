"""Files: where data are looked for, what is in a folder or an archive, and how to write safely."""

import gzip
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from redivider.data.errors import DataError, reason

VARIABLE = "REDIVIDER_DATA"
DAMAGES = (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, RuntimeError)

Found = Iterator[tuple[str, bytes]]


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder asked for, or else $REDIVIDER_DATA, or else ~/.cache/redivider."""
    return Path(folder or os.environ.get(VARIABLE) or "~/.cache/redivider").expanduser()


def places(folder: str | Path | None, name: str) -> tuple[Path, Path]:
    """Where a data set may lie: in the folder itself, or in one of its name there."""
    home = data_folder(folder)
    return home, home / name


def read_files(place: Path, names: Collection[str], *, advice: str) -> Found:
    """The contents of these files of a folder, a .tar.gz or a .zip; nothing is unpacked.

    They come in any order. Archives are read to their end, so that their own checksums are
    compared.

    Args:
        place: The folder or the archive.
        names: The files, by name alone; folders within an archive do not matter.
        advice: What to do when they cannot be read, for the error.
    """
    read = _read_folder if place.is_dir() else _read_zip if place.suffix == ".zip" else _read_tar
    missing = set(names)
    try:
        for name, content in read(place, missing.__contains__):
            missing.discard(name)
            yield name, content
    except DAMAGES as error:
        raise DataError(f"{place} is damaged or cut short ({reason(error)}); {advice}") from None
    if missing:
        raise DataError(f"{place} has no file {min(missing)}; {advice}")


def _read_folder(place: Path, is_wanted: Callable[[str], bool]) -> Found:
    for path in sorted(place.iterdir()):
        if is_wanted(path.name):
            yield path.name, path.read_bytes()


def _read_tar(place: Path, is_wanted: Callable[[str], bool]) -> Found:
    with gzip.open(place) as unzipped:
        with tarfile.open(fileobj=unzipped, mode="r|") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if member.isfile() and is_wanted(name):
                    content = tar.extractfile(member)
                    assert content is not None
                    yield name, content.read()
        while unzipped.read(1 << 20):
            pass  # the checksum comes last


def _read_zip(place: Path, is_wanted: Callable[[str], bool]) -> Found:
    with zipfile.ZipFile(place) as archive:
        for member in archive.infolist():
            name = PurePosixPath(member.filename).name
            if is_wanted(name):
                yield name, archive.read(member)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A file beside this one, which takes its place at the end, or vanishes on an error."""
    new = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
