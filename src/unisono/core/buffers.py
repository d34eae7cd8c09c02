"""Buffers of other libraries as tensors: arrays, DLPack, the buffer protocol, Python's numbers and lists of these."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from typing_extensions import Buffer as SupportsBuffer

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Buffer", "SupportsArrayInterface", "SupportsDLPack", "as_tensor"]


class SupportsDLPack(Protocol):
    """An array of any library that exports DLPack capsules."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


class SupportsArrayInterface(Protocol):
    """An array of any library that describes its memory as NumPy's array interface does."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Buffer: TypeAlias = (
    torch.Tensor | SupportsBuffer | SupportsDLPack | SupportsArrayInterface | complex | Sequence[complex]
)
"""Everything that a call accepts as a tensor."""

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Dtypes of Python's numbers, which hold these without loss; `bool` stands before `int`, whose subclass it is."""
_MEMORY: dict[tuple[str, ...], tuple[torch.dtype, ...]] = {
    ("?",): (torch.bool,),
    ("b", "h", "i", "l", "q", "n"): (torch.int8, torch.int16, torch.int32, torch.int64),
    ("c", "B", "H", "I", "L", "Q", "N"): (torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    ("e", "f", "d"): (torch.float16, torch.float32, torch.float64),
    ("Zf", "Zd", "F", "D"): (torch.complex64, torch.complex128),
}
"""Formats of the buffer protocol, and the dtypes that they stand for, by their width."""
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_READ_ONLY = "{} is read-only and would be written; pass a writable copy"
_NO_DTYPE = "{} has dtype {}, which torch does not have; convert it first, as by astype()"


class _DLTensor(ctypes.Structure):
    """Tensor of a DLPack capsule; all that a capsule of the first version of the protocol has at its beginning."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """Beginning of a DLPack capsule since version 1.0. The lowest flag is "read-only"."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def as_tensor(buffer: object, name: str, *, written: bool) -> torch.Tensor:
    """Return a tensor on the memory of a buffer, and keep that memory alive as long as the tensor.

    Copies what has no memory that torch can use: numbers, lists of numbers, read-only memory without DLPack, and
    arrays with negative strides. The caller returns results to a list.

    Args:
        buffer: As listed by `Buffer`, but no tensor.
        name: Name of the argument, for errors.
        written: Whether the buffer receives a result.

    Raises:
        TypeError: It is no buffer, a single number that would be written, or of a dtype that torch does not have.
        ValueError: It is read-only and would be written, or its strides cannot be used.
    """
    numpy = sys.modules.get("numpy")
    if isinstance(buffer, complex | float | int) or (numpy is not None and isinstance(buffer, numpy.generic)):
        if written:
            raise TypeError(f"{name} is a single number, which cannot be written; pass a list or an array of one")
        return _of_numbers([buffer], name)[0]
    if isinstance(buffer, list | tuple):
        if written and isinstance(buffer, tuple):
            raise TypeError(f"{name} is a tuple, which cannot be written; pass a list")
        return _of_numbers(buffer, name)
    if numpy is not None and hasattr(buffer, "__array_interface__"):
        return _of_array(numpy.asanyarray(buffer), name, written=written)
    if hasattr(buffer, "__dlpack__"):
        return _of_dlpack(buffer, name, written=written)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{name} must be a torch.Tensor, an array, a buffer or numbers, not {type(buffer).__name__}"
        ) from None
    return _of_memory(view, name, written=written)


def _of_numbers(numbers: Sequence[Any], name: str) -> torch.Tensor:
    dtypes = {_dtype_of(number, name) for number in numbers} or {torch.float64}
    if len(dtypes) > 1:
        found = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(f"{name} mixes numbers of {found}; pass numbers of one type")
    plain = [number.item() if hasattr(number, "item") else number for number in numbers]
    try:
        return torch.tensor(plain, dtype=dtypes.pop(), device="cpu")
    except (ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{name} has an integer outside the range of int64; pass floats or an array") from None


def _dtype_of(number: object, name: str) -> torch.dtype:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(number, numpy.generic):
        for kind, dtype in _NUMBERS.items():
            if isinstance(number, kind):
                return dtype
        raise TypeError(f"{name} is a list of {type(number).__name__}; pass one tensor or array, or a list of numbers")
    found = getattr(torch, number.dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(_NO_DTYPE.format(name, number.dtype))
    return found


def _of_array(array: np.ndarray[Any, Any], name: str, *, written: bool) -> torch.Tensor:
    if hasattr(array, "mask"):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass its data or filled()")
    if written and not array.flags.writeable:
        raise ValueError(_READ_ONLY.format(name))
    if not array.dtype.isnative:
        raise TypeError(_NO_DTYPE.format(name, f"{array.dtype} of foreign byte order"))
    if any(stride < 0 or stride % (array.itemsize or 1) for stride in array.strides):
        if written:
            raise ValueError(f"{name} has strides {array.strides}, which torch cannot write; pass a contiguous array")
        array = array.copy()
    try:
        # Types of C that are equal on this machine have one string.
        plain = array.view(array.dtype.str)
        # Torch warns of read-only memory that it gets in another way.
        return torch.from_numpy(plain) if array.flags.writeable else torch.from_dlpack(plain)
    except BufferError:
        return torch.from_numpy(array.copy())
    except TypeError:
        raise TypeError(_NO_DTYPE.format(name, array.dtype)) from None


def _of_dlpack(buffer: Any, name: str, *, written: bool) -> torch.Tensor:
    try:
        read_only, negative = _capsule_traits(buffer)
        if negative:
            # Torch ends the process.
            raise ValueError(f"{name} has a negative stride, which torch cannot use; pass a contiguous array")
        if written and read_only:
            raise ValueError(_READ_ONLY.format(name))
        return torch.from_dlpack(buffer)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"{name} is a {type(buffer).__name__} that torch cannot share by DLPack: {error}") from error


def _capsule_traits(buffer: Any) -> tuple[bool, bool]:
    """Return whether a buffer's DLPack capsule is read-only, which torch ignores, and has negative strides."""
    try:
        capsule = buffer.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = buffer.__dlpack__()
    try:
        whole = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, read_only = whole.tensor, bool(whole.flags & 1)
    except ValueError:
        # The first version has no flags.
        tensor, read_only = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    return read_only, bool(tensor.strides) and any(tensor.strides[i] < 0 for i in range(tensor.ndim))


def _of_memory(view: memoryview, name: str, *, written: bool) -> torch.Tensor:
    dtype = _dtype_of_format(view)
    if dtype is None:
        raise TypeError(_NO_DTYPE.format(name, repr(view.format)))
    if written and view.readonly:
        raise ValueError(_READ_ONLY.format(name))
    if not view.c_contiguous:
        raise ValueError(f"{name} is memory that is not contiguous; pass a contiguous buffer, or an array of NumPy")
    shape = view.shape or ()
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # The view, unlike its object, keeps the memory from being resized.
    memory = bytearray(view) if view.readonly else view
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _dtype_of_format(view: memoryview) -> torch.dtype | None:
    order, code = view.format[:1], view.format.lstrip("@=<>!")
    if view.itemsize > 1 and order in ((">", "!") if sys.byteorder == "little" else ("<",)):
        return None
    family = next((dtypes for codes, dtypes in _MEMORY.items() if code in codes), ())
    return next((dtype for dtype in family if dtype.itemsize == view.itemsize), None)
