"""Safe reading of pickled numpy arrays.

A pickle is a program that may call anything. Those of CIFAR and ImageNet32 only build dictionaries,
lists, numbers, strings and arrays. The few names that they use are bound to the stand-ins below,
which keep bytes and shapes and do nothing else. Every other name is refused. numpy itself is not
used, because it trusts the pickle when it restores an array.

Pickles up to protocol 4 can be read. The data sets need no later one, which has more instructions.
"""

import io
import pickle
from collections.abc import Callable
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from redivider.data.errors import DataError, reason

DTYPES = {
    "u1": torch.uint8,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "f4": torch.float32,
    "f8": torch.float64,
}


# Instructions that create arbitrary objects, refer to persistent or registered ones, or reserve
# buffers of any size.
REFUSED = (
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX),
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)


def read_pickle(content: bytes, *, where: object, advice: str) -> dict[str, Any]:
    """Read the dictionary in a pickle, with its arrays as tensors.

    Args:
        content: Bytes of the pickle.
        where: Origin of the pickle, for errors.
        advice: Remedy to append to errors.
    """
    try:
        # Strings of Python 2 stay bytes, since they hold the data of arrays.
        contents = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(contents, dict):
            raise pickle.UnpicklingError(f"it holds a {type(contents).__name__}, not a dictionary")
        return {_text(key): _unwrap(value) for key, value in contents.items()}
    except _Refused as error:
        raise DataError(
            f"{where} asks for {reason(error)}, which no array needs, and was not read; {advice}"
        ) from None
    except Exception as error:  # a broken program may raise anything
        raise DataError(f"{where} is damaged or cut short ({reason(error)}); {advice}") from None


class _Refused(Exception):
    """Name in a pickle that arrays do not need."""


class _DType:
    """Stand-in for a numpy.dtype: its code and byte order."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = _text(code).lstrip("<|="), "<"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def to_torch(self) -> torch.dtype:
        if self.code not in DTYPES or self.order not in ("<", "|", "="):
            raise pickle.UnpicklingError(f"an array of {self.order}{self.code} is unexpected")
        return DTYPES[self.code]


class _Array:
    """Stand-in for a numpy.ndarray: its bytes and layout."""

    def __init__(self) -> None:
        self.shape, self.dtype, self.content, self.fortran_order = (0,), _DType("u1"), b"", False

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.fortran_order, self.content = state

    def to_tensor(self) -> Tensor:
        dtype = self.dtype.to_torch()
        if len(self.content) != prod(self.shape) * dtype.itemsize:
            raise pickle.UnpicklingError(
                f"an array of shape {self.shape} has {len(self.content)} bytes"
            )
        if not self.content:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(bytearray(self.content), dtype=dtype)
        if not self.fortran_order:
            return flat.view(self.shape)
        return flat.view(self.shape[::-1]).permute(*reversed(range(len(self.shape)))).contiguous()


class _Name:
    """Binding of a name in a pickle: it can be called, but not changed."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes what it should only call")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    return _Array()  # empty; the pickle sets its state next


def _scalar(dtype: Any, content: Any) -> Any:
    array = _Array()
    array.__setstate__((1, (), dtype, False, content))
    return array.to_tensor().item()


def _encode(text: Any, encoding: Any) -> bytes:
    if _text(encoding) != "latin1":  # how Python 3 writes bytes for Python 2
        raise pickle.UnpicklingError("bytes are written as latin1 and in no other way")
    return _text(text).encode("latin1")


NAMES = {
    "_codecs.encode": _Name(_encode),
    "numpy.dtype": _Name(lambda code, *_: _DType(code)),
    "numpy.ndarray": _Name(_Array),
    **{f"numpy.{core}.multiarray._reconstruct": _Name(_reconstruct) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _Name(_scalar) for core in ("core", "_core")},
}


def _refuse(unpickler: object) -> NoReturn:
    raise pickle.UnpicklingError("it has an instruction that no array needs")


class _Unpickler(pickle._Unpickler):
    """Unpickler in Python; the one in C allocates whatever size a damaged pickle asks for."""

    dispatch = pickle._Unpickler.dispatch | dict.fromkeys((code[0] for code in REFUSED), _refuse)

    def find_class(self, module: str, name: str) -> Any:
        binding = NAMES.get(f"{module}.{name}")
        if binding is None:
            raise _Refused(f"{module}.{name}")
        return binding


def _unwrap(value: Any) -> Any:
    return value.to_tensor() if isinstance(value, _Array) else value


def _text(value: Any) -> str:
    if not isinstance(value, bytes | str):
        raise pickle.UnpicklingError(f"a {type(value).__name__} is where text should be")
    return value.decode("latin1") if isinstance(value, bytes) else value
