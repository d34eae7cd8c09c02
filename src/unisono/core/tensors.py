"""Checks on tensors that are to be sent or written to, and conversion to one-dimensional contiguous tensors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Buffer as SupportsBuffer

from unisono.core.types import ReduceOp
from unisono.serialization.tensors import has_no_storage

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "COMBINE",
    "HALVES",
    "Buffer",
    "SupportsArrayInterface",
    "SupportsDLPack",
    "as_flat",
    "as_tensor",
    "check_apart",
    "check_reducible",
    "check_tensor",
    "copy_back",
    "divide",
    "is_non_overlapping",
    "is_transformed",
    "numels",
    "parse_op",
    "view_of",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CPU = frozenset({"cpu"})
_ODD = frozenset({torch.complex32, torch.complex64, torch.complex128})
_ODD |= {getattr(torch, name) for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4") if hasattr(torch, name)}
"""Dtypes of tensors that may be conjugated views, or quantized."""


def as_flat(
    tensor: object, name: str, index: int | None = None, *, written: bool = False, devices: frozenset[str] = _CPU
) -> torch.Tensor | None:
    """Return a contiguous tensor in memory on one of these devices: the given tensor, or a copy.

    Return None for a tensor that needs the general path, such as one on another device or an instance of a subclass;
    `copy_back` writes a copy back to its source. Raises the same errors as `check_tensor`.
    """
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in _PLAIN:
        return None
    try:
        # Checking `is_cpu` takes a tenth as long as reading the device's type.
        here = tensor.is_cpu if devices is _CPU else tensor.device.type in devices
        plain = here and tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_neg())
    except RuntimeError:
        # The tensor has a layout without strides, such as sparse.
        return None
    if tensor.dtype in _ODD and (tensor.is_conj() or tensor.is_quantized):
        plain = False
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return None
    if plain:
        return tensor
    if not here:
        return None
    label = f"{name}[{index}]" if index is not None else "the tensor" if name == "tensor" else name
    check_tensor(tensor, label, devices, written=written)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def numels(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the number of elements of each tensor."""
    return tuple(map(torch.Tensor.numel, tensors))


def check_tensor(tensor: object, name: str, devices: frozenset[str], *, written: bool) -> torch.Tensor:
    """Return the tensor, or one that shares the buffer's memory; raise an error if it can't be communicated safely.

    Raises:
        TypeError, ValueError: The buffer is invalid (see `as_tensor`), or the tensor cannot be sent.
    """
    if not isinstance(tensor, torch.Tensor):
        tensor = as_tensor(tensor, name, written=written)
    if (type(tensor) not in _PLAIN or tensor.is_nested) and has_no_storage(tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, whose elements are not in its own memory; pass the plain tensor "
            "that it holds, such as dtensor.to_local()"
        )
    if tensor.is_quantized:
        raise ValueError(f"{name} is quantized; convert it with .dequantize() first, or send its int_repr()")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; convert it with .to_dense() first")
    if tensor.device.type not in devices:
        raise ValueError(
            f"{name} is on {tensor.device}, which this backend does not support; it supports "
            f"{', '.join(sorted(devices))}"
        )
    if tensor.requires_grad and torch.is_grad_enabled() and _has_history(tensor):
        raise ValueError(
            f"{name} has a gradient history, as views of parameters have, and communication would silently lose it; "
            "keep it by the function of the same name in un.autograd, such as un.autograd.all_reduce(tensor, comm), "
            "or pass tensor.detach(), or call inside torch.no_grad()"
        )
    if written and not (tensor.is_contiguous() or is_non_overlapping(tensor)):
        raise ValueError(
            f"{name} has elements that share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), "
            "as after expand(); pass tensor.contiguous() or a separate tensor"
        )
    return tensor


def _has_history(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has an autograd history, or would have one after a write.

    Torch reports a view created without gradients as a leaf until something writes to the view. A collective may write
    to the tensor on some ranks only, so `is_leaf` alone would differ between ranks.
    """
    base = tensor._base
    return (base is not None and base.requires_grad) or not tensor.is_leaf


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether `vmap` or another transform of `torch.func` has wrapped a tensor.

    Returns False while torch.compile compiles the caller, because Dynamo cannot trace the check.
    """
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_apart(written: Sequence[tuple[str, torch.Tensor]], read: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
    """Raise `ValueError` if a tensor that is written shares elements with another of these tensors."""
    spans = sorted(
        (
            (t.data_ptr(), t.data_ptr() + _extent(t) * t.element_size(), index, index < len(written), name, t)
            for index, (name, t) in enumerate([*written, *read])
            if t.numel()
        ),
        key=lambda span: span[:3],
    )
    for i, (_, stop, _, writes, name, tensor) in enumerate(spans):
        for start, _, _, other_writes, other_name, other in spans[i + 1 :]:
            if start >= stop:
                break
            if (writes or other_writes) and tensor.device == other.device and _share(tensor, other):
                raise ValueError(f"{name} and {other_name} share memory; pass separate tensors")


def copy_back(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result into its tensor, whether or not the tensor was created in inference mode.

    On an accelerator, the copy is only queued on the current stream, so the result's pinned memory must not be reused
    before the copy has run.
    """
    if tensor.data_ptr() != result.data_ptr():
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(result, non_blocking=True)


def view_of(tensor: torch.Tensor) -> memoryview:
    """View of the bytes of a contiguous CPU tensor. The tensor must outlive the view.

    Slicing the view costs a tenth as much as slicing the tensor.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements spanned in memory, from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_non_overlapping(tensor: torch.Tensor) -> bool:
    """Return whether no two of the tensor's elements share memory."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            # Interleaved strides may still give each element its own address; counting the addresses is the only way to
            # find out.
            return stride > 0 and _places(tensor, 0).unique().numel() == tensor.numel()
        reach += (size - 1) * stride
    return True


def _places(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Each element's position in memory, in elements; the first element is at `offset`."""
    return torch.arange(_extent(tensor), device="cpu").as_strided(tensor.shape, tensor.stride()).reshape(-1) + offset


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_contiguous() and b.is_contiguous():
        return True
    if a.element_size() != b.element_size() or (b.data_ptr() - a.data_ptr()) % a.element_size():
        return True
    return bool(torch.isin(_places(b, (b.data_ptr() - a.data_ptr()) // a.element_size()), _places(a, 0)).any())


class SupportsDLPack(Protocol):
    """Array from any library that exports DLPack capsules."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


class SupportsArrayInterface(Protocol):
    """Array from any library that supports NumPy's array interface."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Buffer: TypeAlias = (
    torch.Tensor | SupportsBuffer | SupportsDLPack | SupportsArrayInterface | complex | Sequence[complex]
)
"""Types that a call accepts as a tensor."""

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Lossless dtypes for Python's numbers; `bool` comes before `int`, because it is a subclass of `int`."""
_MEMORY: dict[tuple[str, ...], tuple[torch.dtype, ...]] = {
    ("?",): (torch.bool,),
    ("b", "h", "i", "l", "q", "n"): (torch.int8, torch.int16, torch.int32, torch.int64),
    ("c", "B", "H", "I", "L", "Q", "N"): (torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    ("e", "f", "d"): (torch.float16, torch.float32, torch.float64),
    ("Zf", "Zd", "F", "D"): (torch.complex64, torch.complex128),
}
"""Dtypes for the formats of the buffer protocol, by width."""
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_READ_ONLY = "{} is read-only and would be written; pass a writable copy"
_NO_DTYPE = "{} has dtype {}, which torch does not have; convert it first, as by astype()"


class _DLTensor(ctypes.Structure):
    """DLPack's description of a tensor; a capsule of a version before 1.0 begins with it."""

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
    """Beginning of a DLPack capsule since version 1.0. The lowest bit of `flags` means "read-only"."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def as_tensor(buffer: object, name: str, *, written: bool) -> torch.Tensor:
    """Return a tensor that shares a buffer's memory and keeps the buffer alive.

    The tensor is a copy if torch cannot use the memory: for numbers, lists of numbers, read-only memory without DLPack,
    and arrays with negative strides. The caller must write results back to a list.

    Args:
        buffer: Any type in `Buffer` except a tensor.
        name: Name of the argument, for errors.
        written: Whether the buffer receives a result.

    Raises:
        TypeError: The argument is not a buffer, is a single number that would be written to, or has a dtype that torch
            lacks.
        ValueError: The buffer is read-only and would be written to, or its strides cannot be used.
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
        # C types that are identical on this machine, such as long and long long, have the same dtype string.
        plain = array.view(array.dtype.str)
        # For read-only memory, use DLPack: with any other protocol, torch warns.
        return torch.from_numpy(plain) if array.flags.writeable else torch.from_dlpack(plain)
    except BufferError:
        return torch.from_numpy(array.copy())
    except TypeError:
        raise TypeError(_NO_DTYPE.format(name, array.dtype)) from None


def _of_dlpack(buffer: Any, name: str, *, written: bool) -> torch.Tensor:
    try:
        read_only, negative = _capsule_traits(buffer)
        if negative:
            # Raise here, because torch would abort the process.
            raise ValueError(f"{name} has a negative stride, which torch cannot use; pass a contiguous array")
        if written and read_only:
            raise ValueError(_READ_ONLY.format(name))
        return torch.from_dlpack(buffer)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"{name} is a {type(buffer).__name__} that torch cannot share by DLPack: {error}") from error


def _capsule_traits(buffer: Any) -> tuple[bool, bool]:
    """Return whether a DLPack capsule is read-only (which torch ignores), and whether it has negative strides."""
    try:
        capsule = buffer.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = buffer.__dlpack__()
    try:
        whole = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor = whole.tensor
        read_only = bool(whole.flags & 1)
    except ValueError:
        # A capsule from before DLPack 1.0 has no flags, so it does not say whether it is read-only.
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        read_only = False
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
    # Pass the view rather than the underlying buffer, because the buffer cannot be resized while a view exists.
    memory = bytearray(view) if view.readonly else view
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _dtype_of_format(view: memoryview) -> torch.dtype | None:
    order = view.format[:1]
    code = view.format.lstrip("@=<>!")
    if view.itemsize > 1 and order in ((">", "!") if sys.byteorder == "little" else ("<",)):
        return None
    family = next((dtypes for codes, dtypes in _MEMORY.items() if code in codes), ())
    return next((dtype for dtype in family if dtype.itemsize == view.itemsize), None)


HALVES = (torch.float16, torch.bfloat16, torch.complex32)
"""Dtypes for which an average divides before it sums, so that the sum does not overflow."""

_known: set[tuple[ReduceOp, torch.dtype]] = set()
"""Operations and dtypes that are known to work together."""

COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def divide(total: torch.Tensor, size: int) -> None:
    """Divide in place; if the inverse is exact, multiply by it, which is faster. Treat complex numbers as pairs."""
    total = torch.view_as_real(total) if total.is_complex() else total
    if size.bit_count() == 1 and total.is_floating_point():
        total.mul_(1 / size)
    else:
        total.div_(size)


def parse_op(op: str | ReduceOp | object) -> ReduceOp:
    """Return the `ReduceOp` for its name or for torch's own `ReduceOp`; raise `ValueError` for unknown names.

    Example:
        >>> parse_op("SUM")
        <ReduceOp.SUM: 'sum'>
    """
    name = str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()
    try:
        return ReduceOp(name)
    except ValueError:
        known = ", ".join(member.value for member in ReduceOp)
        raise ValueError(f"unknown reduce operation {op!r}; known: {known}") from None


def check_reducible(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise `ValueError` if torch cannot reduce this dtype with this operation."""
    if (op, dtype) in _known:
        return
    if op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"avg of {dtype} would lose the fraction: use op='sum' and divide yourself, or convert to a float dtype"
        )
    try:
        # The result is cached for the whole process, so it must not depend on a mode that the user has set.
        with _disable_current_modes(), torch.DisableTorchFunction():
            one = torch.ones(1, dtype=dtype, device="cpu")
            COMBINE[op](one, one.clone(), out=one)
            if op is ReduceOp.AVG:
                divide(one, 3)
    except (RuntimeError, TypeError):
        raise ValueError(f"torch does not support {op.value} on {dtype}; convert the tensor first") from None
    _known.add((op, dtype))
