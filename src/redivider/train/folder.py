"""The folder of a run: one process at a time, and files that are whole or not there."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redivider.train.errors import TrainError

LOCK = ".lock"


def claim(folder: Path, *, numbered: bool) -> Path:
    """Make a folder for a new run: this one, or the first one with a number that is free."""
    made, number = folder, 2
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                made.mkdir()
                return made
            except FileExistsError:
                if not numbered and made.is_dir() and not any(made.iterdir()):
                    return made
                if not numbered:
                    raise TrainError(
                        f"{folder} is there already; take another folder, or go on with a run by "
                        "--resume (in Python resume=True)"
                    ) from None
                made, number = folder.with_name(f"{folder.name}-{number}"), number + 1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out while this one trains there."""
    with writing(folder):
        file = (folder / LOCK).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(f"another process is training in {folder}; let it end") from None
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file beside, and put it in its place when it is complete."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")  # others may write it, too
    with writing(path.parent):
        try:
            new.write_text(text, encoding="utf-8")
            os.replace(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say what to do where a disk is full, or a folder cannot be written to."""
    try:
        yield
    except OSError as error:
        may_be_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
        do = "make room there, or take another folder" if may_be_full else "take another folder"
        raise TrainError(f"cannot write to {folder} ({error.strerror or error}); {do}") from error
