"""Elements as bytes: what each dtype is called in the manifest and in a safetensors file."""

from __future__ import annotations

import ctypes

import torch

from unisono.serialization.tensors import has_no_storage

__all__ = ["as_bytes", "check_savable", "dtype_of", "memory_of", "name_of", "safetensors_form"]

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# Not every reader of safetensors knows complex numbers: they are pairs there, and the manifest says so.
_PAIRS = {"bcomplex32": "BF16", "complex32": "F16", "complex64": "F32", "complex128": "F64"}
# Each element is stored as one byte, whatever it means.
_OPAQUE = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")

_KNOWN: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_SAFETENSORS, *_PAIRS, *_OPAQUE) if hasattr(torch, name)
}


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype in the manifest, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """The dtype of that name; `ValueError` if this torch has none such."""
    if not isinstance(name, str) or name not in _KNOWN:
        raise ValueError(f"no dtype {name!r} in torch {torch.__version__}")
    return _KNOWN[name]


def check_savable(tensor: torch.Tensor, name: str) -> None:
    """`TypeError` that names the tensor unless its elements are plain bytes in memory."""
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{name!r} has no shape yet: run the model once before saving it")
    if has_no_storage(tensor):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, whose elements are not in its own memory; save plain tensors "
            "instead, such as a DTensor's full_tensor()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or name_of(tensor.dtype) not in _KNOWN:
        kind = tensor.layout if tensor.layout != torch.strided else tensor.dtype
        raise TypeError(f"{name!r} is a tensor of {kind}, which cannot be saved; save dense tensors instead")
    if tensor.device.type == "meta":
        raise TypeError(f"{name!r} is on the meta device: it has a shape, but no elements to save")


def safetensors_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """The dtype and shape of such a tensor in a safetensors file.

    Example:
        >>> safetensors_form(torch.complex64, (3,))
        ('F32', [3, 2])
    """
    name = name_of(dtype)
    if name in _PAIRS:
        return _PAIRS[name], [*shape, 2]
    return _SAFETENSORS.get(name, "U8"), list(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a CPU tensor in order, as n uint8 values: a view if it is contiguous, else a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return torch.empty(0, dtype=torch.uint8)
    # Unlike view(-1), this has stride 1 also where there is only one element.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def memory_of(flat: torch.Tensor) -> memoryview:
    """The memory of contiguous uint8 values on the CPU, without a copy. The tensor must outlive it."""
    if not flat.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")
