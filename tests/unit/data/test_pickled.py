"""Pickles: arrays come out, and nothing that a pickle says is run."""

import os
import pickle
import struct
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redivider.data import DataError
from redivider.data.pickled import DTYPES, NAMES, read_pickle

SHAPES: list[tuple[int, ...]] = [(3, 5), (4,), (2, 3, 4), (0, 7), ()]
ORDERS: list[Literal["C", "F"]] = ["C", "F"]


def read(content: bytes):
    return read_pickle(content, where="the file", advice="get another")


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("code", DTYPES)
def test_arrays_of_every_protocol(protocol, code):
    for shape in SHAPES:
        for order in ORDERS:
            array = np.arange(np.prod(shape, dtype=int)).astype(code).reshape(shape, order=order)
            content = {"data": np.array(array, order=order), "labels": [1, 2], "name": "x"}
            if not array.size and protocol < 3:
                continue  # these protocols write empty bytes as a call, which no file needs
            result = read(pickle.dumps(content, protocol))
            assert result["data"].dtype == DTYPES[code]
            assert result["data"].shape == shape
            assert result["data"].tolist() == array.tolist()
            assert result["labels"] == [1, 2]


@pytest.mark.parametrize("protocol", range(5))
def test_numpy_numbers_and_keys_that_are_bytes(protocol):
    content = {b"labels": [np.int64(3), np.int64(-1)], b"mean": np.float64(0.5)}
    assert read(pickle.dumps(content, protocol)) == {"labels": [3, -1], "mean": 0.5}


def short_string(text: bytes) -> bytes:
    """Return a string as Python 2 pickles it."""
    return b"U" + bytes([len(text)]) + text


def python2(module: bytes, pixels: bytes, rows: int, columns: int) -> bytes:
    """Return a dictionary with an array as Python 2 pickles it, like CIFAR's files."""
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            short_string(b"data"),
            b"c" + module + b"\n_reconstruct\n",
            b"cnumpy\nndarray\nK\x00\x85" + short_string(b"b") + b"\x87R",
            b"(K\x01K" + bytes([rows]) + b"K" + bytes([columns]) + b"\x86",
            b"cnumpy\ndtype\n" + short_string(b"u1") + b"K\x00K\x01\x87R",
            b"(K\x03" + short_string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb",
            short_string(b"labels"),
            b"]q\x02(K\x07K\x09e",
            b"u.",
        ]
    )


def test_python_2():
    pixels = bytes(range(250, 256)) + bytes(range(4))
    result = read(python2(b"numpy.core.multiarray", pixels, 2, 5))
    assert result["data"].tolist() == [[250, 251, 252, 253, 254], [255, 0, 1, 2, 3]]
    assert result["labels"] == [7, 9]
    true = pickle.loads(python2(b"numpy._core.multiarray", pixels, 2, 5), encoding="latin1")
    assert result["data"].tolist() == true["data"].tolist()


class Calls:
    """Object that pickles as a call of any function."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def by_name(module: str, name: str, *args: str) -> bytes:
    """Return a pickled dictionary with a call of a name that need not exist."""
    coded = [arg.encode() for arg in args]
    strings = b"".join(b"X" + struct.pack("<i", len(arg)) + arg for arg in coded)
    return f"\x80\x02}}X\x04\x00\x00\x00datac{module}\n{name}\n(".encode("latin1") + (
        strings + b"tRs."
    )


HOSTILE = {
    "os.system": "posix.system",
    "eval": "__builtin__.eval",
    "exec": "builtins.exec",
    "getattr": "builtins.getattr",
    "import": "builtins.__import__",
    "numpy load": "numpy.load",
    "numpy testing": "numpy.testing._private.utils.runstring",
    "partial": "functools.partial",
    "torch": "torch.load",
    "our own": "redivider.data.files.data_folder",
    "dotted": "numpy.dtype.__class__",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_names_are_refused(case, tmp_path):
    module, _, name = HOSTILE[case].rpartition(".")
    with pytest.raises(DataError) as caught:
        read(by_name(module, name, f"touch {tmp_path}/ran"))
    assert str(caught.value) == (
        f"the file asks for {HOSTILE[case]}, which no array needs, and was not read; get another"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("protocol", range(5))
def test_nothing_is_run(protocol, tmp_path):
    mark = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for call in (Calls(os.system, f"touch {mark}"), Calls(eval, code), Calls(exec, code)):
        for content in ({"data": call}, {"data": [1, {"x": (call,)}]}, call):
            payload = pickle.dumps(content, protocol)
            with pytest.raises(DataError, match="asks for"):
                read(payload)
            assert not mark.exists()
    pickle.loads(payload)
    assert mark.exists()  # it would have


def test_arrays_of_objects_are_refused():
    content = {"data": np.array([1, "x", None], dtype=object)}
    for protocol in range(5):
        with pytest.raises(DataError, match="the file"):
            read(pickle.dumps(content, protocol))


@pytest.mark.parametrize(
    "content",
    [
        {"data": np.arange(3, dtype=">i8")},
        {"data": np.zeros(2, dtype=[("a", "u1"), ("b", "i8")])},
        {"data": np.array(["text"])},
        [1, 2],
        {(1, 2): 3},
    ],
)
def test_what_is_not_expected_is_refused(content):
    with pytest.raises(DataError, match="the file is damaged or cut short"):
        read(pickle.dumps(content, 2))


def test_stand_ins_cannot_be_changed():
    """A pickle may set the state of what a name is bound to; that would outlive it."""
    for name in NAMES:
        module, _, last = name.rpartition(".")
        content = f"\x80\x02}}X\x04\x00\x00\x00datac{module}\n{last}\n".encode("latin1")
        for state in (b"}X\x01\x00\x00\x00xK\x01s", b"N}X\x09\x00\x00\x00_functionK\x01s\x86"):
            with pytest.raises(DataError, match="changes what it should only call"):
                read(content + state + b"bs.")
    read(pickle.dumps({"data": np.arange(3)}, 2))


@pytest.mark.parametrize(
    "code",
    [
        *(b"\x81", b"\x92", b"(i", b"(o", b"Pid\n", b"Q", b"\x82\x01", b"\x83\x01\x00", b"\x97"),
        *(b"\x84\x01\x00\x00\x00", b"\x96" + bytes([255] * 7 + [0]), b"\x98"),
    ],
)
def test_instructions_that_no_array_needs(code):
    with pytest.raises(DataError, match="has an instruction that no array needs"):
        read(b"\x80\x04}" + code + b".")


def test_a_number_in_the_file_reserves_no_memory():
    """Places to remember, lengths of strings and frames: each says 4 GB or far more."""
    four, eight = bytes([255] * 4), bytes([255] * 7 + [0])
    for code in (b"r" + four, b"B" + four, b"X" + four, b"\x8e" + eight, b"\x95" + eight):
        with pytest.raises(DataError, match="the file"):
            read(b"\x80\x04}" + code)


def test_bytes_are_written_in_one_way():
    assert read(by_name("_codecs", "encode", "ü", "latin1")) == {"data": b"\xfc"}
    for encoding in ("utf-8", "rot13", "zlib"):
        with pytest.raises(DataError, match="written as latin1 and in no other way"):
            read(by_name("_codecs", "encode", "x", encoding))


def test_protocol_5_is_refused():
    with pytest.raises(DataError, match="the file"):
        read(pickle.dumps({"data": np.arange(3)}, 5))


def test_shapes_that_lie():
    pixels = bytes(10)
    for rows, columns in ((2, 6), (0, 0), (255, 255)):
        with pytest.raises(DataError, match="has 10 bytes"):
            read(python2(b"numpy.core.multiarray", pixels, rows, columns))


def test_every_shorter_file_is_refused():
    for protocol in (0, 2, 4):
        whole = pickle.dumps({"data": np.arange(6, dtype="u1"), "labels": [1]}, protocol)
        for size in range(len(whole)):
            with pytest.raises(DataError, match=r"cut short|asks for") as caught:
                read(whole[:size])
            assert "\n" not in str(caught.value)


@given(st.data())
def test_whatever_is_changed_gives_a_dictionary_or_one_error(data):
    whole = bytearray(
        pickle.dumps(
            {"data": np.arange(6, dtype="u1"), "labels": [1, 2]},
            data.draw(st.sampled_from([0, 2, 4])),
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = read(bytes(whole))
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(result, dict)


def test_tensors_are_writable_and_their_own():
    content = pickle.dumps({"data": np.zeros(4, dtype="u1")}, 4)
    read(content)["data"].fill_(1)
    assert torch.equal(read(content)["data"], torch.zeros(4, dtype=torch.uint8))
