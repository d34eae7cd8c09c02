"""Codecs for torch's tensors, dtypes, devices and sizes, and for numpy's arrays. Imports neither package."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.serialization.format import (
    Encoder,
    Parts,
    UnsendableError,
    View,
    add_decoders,
    head,
    put_text,
    take_bytes,
    take_text,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["find", "has_no_storage", "put_dense", "put_shape", "put_tensor", "take_shape", "why_not_dense"]


def find(cls: type[Any]) -> Encoder | None:
    """Return the encoder for a torch or numpy type; None for any other type."""
    torch = sys.modules.get("torch")
    if torch is not None:
        if issubclass(cls, torch.Tensor):
            return put_tensor
        for known, encoder in ((torch.dtype, _put_dtype), (torch.device, _put_device), (torch.Size, _put_size)):
            if cls is known:
                return encoder
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, (numpy.ndarray, numpy.generic)):
        return _put_numpy
    return None


def put_shape(parts: Parts, shape: Sequence[int]) -> None:
    """Append the number of dimensions, and their sizes."""
    parts.append(struct.pack(f"<B{len(shape)}Q", len(shape), *shape))


def take_shape(view: View, at: int) -> tuple[tuple[int, ...], int]:
    """Return the sizes that `put_shape` wrote, and the offset after them."""
    count = view[at]
    shape = struct.unpack_from(f"<{count}Q", view, at + 1)
    if max(shape, default=0) >= 2**63:
        raise ValueError("a shape has a negative or a huge size")
    return shape, at + 1 + 8 * count


# -- torch -----------------------------------------------------------------------------------------
def has_no_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are not in its own memory, as in DTensor, masked and nested tensors."""
    import torch

    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.is_nested


def why_not_dense(tensor: torch.Tensor) -> str | None:
    """Describe a tensor whose elements are not plain bytes in memory; return None for a dense tensor."""
    import torch

    if has_no_storage(tensor):
        return f"a {type(tensor).__name__}, whose elements are not in its own memory"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "meta" if tensor.device.type == "meta" else "quantized" if tensor.is_quantized else str(tensor.layout)
        return f"a {kind} tensor, which has no plain bytes (make it dense first)"
    return None


def put_tensor(parts: Parts, tensor: torch.Tensor, _depth: int) -> None:
    """Append a tensor, which will arrive as a contiguous CPU tensor."""
    problem = why_not_dense(tensor)
    if problem is not None:
        raise UnsendableError(problem)
    put_dense(parts, tensor)


def put_dense(parts: Parts, tensor: torch.Tensor) -> None:
    """Append a dense tensor."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    parts.append(b"A")
    put_text(parts, str(dense.dtype).removeprefix("torch."))
    put_shape(parts, dense.shape)
    parts.append(head("b", dense.nbytes)[1:])
    if dense.nbytes:
        # Read the memory directly: this makes only one copy, and does not need numpy.
        parts.append((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()).raw)


def _take_tensor(view: View, at: int, _depth: int) -> tuple[torch.Tensor, int]:
    import torch

    name, at = take_text(view, at + 1)
    dtype = _dtype(name)
    shape, at = take_shape(view, at)
    content, at = take_bytes(view, at)
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"a tensor of shape {shape} and {name} does not have {len(content)} bytes")
    raw = torch.empty(len(content), dtype=torch.uint8, device="cpu")
    if len(content):
        memoryview((ctypes.c_char * len(content)).from_address(raw.data_ptr())).cast("B")[:] = content
    # Normalize bools, because operations disagree about a bool whose byte is neither 0 nor 1.
    return (raw.ne(0) if dtype == torch.bool else raw.view(dtype)).reshape(shape), at


def _put_dtype(parts: Parts, dtype: torch.dtype, _depth: int) -> None:
    parts.append(b"Y")
    put_text(parts, str(dtype).removeprefix("torch."))


def _take_dtype(view: View, at: int, _depth: int) -> tuple[torch.dtype, int]:
    name, at = take_text(view, at + 1)
    return _dtype(name), at


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r} here")
    return dtype


def _put_device(parts: Parts, device: torch.device, _depth: int) -> None:
    parts.append(b"V")
    put_text(parts, str(device))


def _take_device(view: View, at: int, _depth: int) -> tuple[torch.device, int]:
    import torch

    name, at = take_text(view, at + 1)
    return torch.device(name), at


def _put_size(parts: Parts, size: torch.Size, _depth: int) -> None:
    parts.append(b"X")
    put_shape(parts, size)


def _take_size(view: View, at: int, _depth: int) -> tuple[torch.Size, int]:
    import torch

    shape, at = take_shape(view, at)
    return torch.Size(shape), at


# -- numpy -----------------------------------------------------------------------------------------
def _put_numpy(parts: Parts, array: np.ndarray[Any, Any] | np.generic, _depth: int) -> None:
    numpy = sys.modules["numpy"]
    if isinstance(array, numpy.ndarray) and type(array) not in (numpy.ndarray, numpy.memmap):
        raise UnsendableError(f"a {type(array).__name__}, which would arrive as a plain numpy array")
    if array.dtype.hasobject or array.dtype.names is not None or not array.dtype.itemsize:
        raise UnsendableError(f"a numpy array of {array.dtype}, which has no plain bytes")
    parts.append(b"M" if isinstance(array, numpy.ndarray) else b"m")
    put_text(parts, array.dtype.str)
    put_shape(parts, array.shape)
    content = array.tobytes()
    parts.append(head("b", len(content))[1:])
    parts.append(content)


def _take_array(view: View, at: int, _depth: int) -> tuple[Any, int]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise ValueError("a numpy array was sent, but numpy is not imported here")
    name, at = take_text(view, at + 1)
    dtype = numpy.dtype(name)
    if dtype.hasobject or dtype.names is not None or dtype.str != name:
        raise ValueError(f"there are no numpy arrays of {name!r}")
    shape, at = take_shape(view, at)
    content, at = take_bytes(view, at)
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of shape {shape} and {name} does not have {len(content)} bytes")
    return numpy.frombuffer(bytearray(content), dtype).reshape(shape), at


def _take_scalar(view: View, at: int, depth: int) -> tuple[Any, int]:
    array, at = _take_array(view, at, depth)
    return array[()], at


add_decoders(
    {
        "A": _take_tensor,
        "Y": _take_dtype,
        "V": _take_device,
        "X": _take_size,
        "M": _take_array,
        "m": _take_scalar,
    }
)
