"""Folder of a run: used by one process at a time, with files that are complete or absent."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redivider.files import atomic_write
from redivider.train.errors import TrainError

LOCK = ".lock"


def claim(folder: Path, *, numbered: bool) -> Path:
    """Make a folder for a new run: this one, or, if `numbered`, the first free `folder-N`.

    `mkdir` is atomic, so that two processes never get the same numbered folder.
    """
    path, number = folder, 2
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                if not numbered and path.is_dir() and not any(path.iterdir()):
                    return path
                if not numbered:
                    raise TrainError(
                        f"{folder} exists; choose another folder, or resume its run with "
                        "--resume (in Python resume=True)"
                    ) from None
                path, number = folder.with_name(f"{folder.name}-{number}"), number + 1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no other process trains there."""
    with writing(folder):
        file = (folder / LOCK).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(f"another process is training in {folder}; let it end") from None
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a text file, so that no reader sees a part of it."""
    with writing(path.parent), atomic_write(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into an error that says what to do about a full disk or a bad folder."""
    try:
        yield
    except OSError as error:
        may_be_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
        room = "make room there, or " if may_be_full else ""
        raise TrainError(
            f"cannot write to {folder} ({error.strerror or error}); {room}choose another folder"
        ) from error
