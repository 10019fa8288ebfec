"""A download is there whole and right, or not at all."""

import hashlib
import socket
from pathlib import Path

import pytest
from support.server import serving

from redivider.data import DataError
from redivider.data import download as module
from redivider.data.download import download

CONTENT = bytes(range(256)) * 20_000  # several chunks
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(params=["fresh", "there"])
def path(request, tmp_path) -> Path:
    """Where to; in one case there is an older file, which must not suffer."""
    path = tmp_path / "folder" / "file.bin"
    if request.param == "there":
        path.parent.mkdir()
        path.write_bytes(b"old")
    return path


def untouched(path: Path) -> bool:
    left = list(path.parent.iterdir()) if path.parent.exists() else []
    return not left or (left == [path] and path.read_bytes() == b"old")


def test_right(path, monkeypatch, capsys):
    with serving({"/file.bin": CONTENT}, monkeypatch) as (url, _):
        download(f"{url}/file.bin", path, md5=MD5)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert "5.12M" in capsys.readouterr().err  # the bar


def test_wrong_checksum(path, monkeypatch):
    with serving({"/file.bin": CONTENT[:-1] + b"x"}, monkeypatch) as (url, _):
        refused(f"{url}/file.bin", path, f"its md5 is .*, not {MD5}")


def test_cut_short(path, monkeypatch):
    with serving({"/file.bin": CONTENT}, monkeypatch, short=1000) as (url, _):
        refused(f"{url}/file.bin", path, "ended after 5,119,000 of 5,120,000 bytes|IncompleteRead")


def test_not_there(path, monkeypatch):
    with serving({}, monkeypatch) as (url, _):
        refused(f"{url}/file.bin", path, "404")


def test_dead_port(path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    was_there = path.parent.exists()
    refused(f"http://127.0.0.1:{port}/file.bin", path, "refused.* or --data-folder")
    assert path.parent.exists() == was_there, "its name may be mistyped"


def test_silent_server(path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin"
        refused(url, path, "timed out", timeout=0.2)


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(DataError, match=r"cannot download .*folder.*REDIVIDER_DATA"):
        download("http://127.0.0.1:9", tmp_path / "folder" / "file.bin", md5=MD5)
    assert (tmp_path / "folder").read_text() == "a file"


def test_a_full_disk_and_an_interrupt(path, monkeypatch):
    class Full(OSError):
        pass

    for error, expected in ((Full("No space left"), DataError), (KeyboardInterrupt(), None)):
        with serving({"/file.bin": CONTENT}, monkeypatch) as (url, _), monkeypatch.context() as m:
            m.setattr(module, "hashlib", Stopping(error))
            with pytest.raises(expected or KeyboardInterrupt):
                download(f"{url}/file.bin", path, md5=MD5)
        assert untouched(path)


class Stopping:
    """In the place of hashlib: lets one chunk pass and then raises."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.chunks = error, 0

    def md5(self, **_: object) -> "Stopping":
        return self

    def update(self, chunk: bytes) -> None:
        self.chunks += 1
        if self.chunks == 2:
            raise self.error


def refused(url: str, path: Path, message: str, **options) -> None:
    with pytest.raises(DataError) as caught:
        download(url, path, md5=MD5, **options)
    text = str(caught.value)
    caught.match(message)
    for part in (url, "put file.bin into", str(path.parent), "REDIVIDER_DATA"):
        assert part in text
    assert "\n" not in text
    assert untouched(path)
