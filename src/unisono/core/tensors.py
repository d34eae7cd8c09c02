"""Checks of the tensors that may be sent or written to, and conversion to one-dimensional contiguous ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from unisono.core.buffers import as_tensor
from unisono.serialization.tensors import has_no_storage

__all__ = [
    "as_flat",
    "check_apart",
    "check_tensor",
    "copy_back",
    "is_inference_locked",
    "is_non_overlapping",
    "numels",
    "view_of",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CPU = frozenset({"cpu"})
_ODD = frozenset({torch.complex32, torch.complex64, torch.complex128})
_ODD |= {getattr(torch, name) for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4") if hasattr(torch, name)}
"""Dtypes of tensors that may be conjugated views, or quantized."""


def as_flat(tensor: object, name: str, index: int | None = None, *, written: bool = False) -> torch.Tensor | None:
    """Return a tensor with contiguous elements in CPU memory: the given tensor, or a contiguous copy.

    None for a tensor that needs the general path, such as a GPU tensor or a subclass; `copy_back` writes a copy
    back to its source. Raises as `check_tensor`.
    """
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in _PLAIN:
        return None
    try:
        plain = tensor.is_contiguous() and tensor.is_cpu and not (tensor.requires_grad or tensor.is_neg())
    except RuntimeError:
        # A layout that knows no strides.
        return None
    if tensor.dtype in _ODD and (tensor.is_conj() or tensor.is_quantized):
        plain = False
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return None
    if plain:
        return tensor
    if not tensor.is_cpu:
        return None
    label = f"{name}[{index}]" if index is not None else "the tensor" if name == "tensor" else name
    check_tensor(tensor, label, _CPU, written=written)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def numels(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the number of elements of each tensor."""
    return tuple(map(torch.Tensor.numel, tensors))


def is_inference_locked(tensor: torch.Tensor) -> bool:
    """Return whether torch permits writes to it in inference mode only, and that mode is off."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def check_tensor(tensor: object, name: str, devices: frozenset[str], *, written: bool) -> torch.Tensor:
    """Return the tensor, or that of a buffer; an error if it cannot be sent, or received into, without harm.

    Raises:
        TypeError, ValueError: As `as_tensor`, or for a tensor that cannot be sent.
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
    if written and not is_non_overlapping(tensor):
        raise ValueError(
            f"{name} has elements that share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), "
            "as after expand(); pass tensor.contiguous() or a separate tensor"
        )
    return tensor


def _has_history(tensor: torch.Tensor) -> bool:
    """Return whether autograd follows a tensor back to another, or would after a write.

    Torch calls a view that was made without gradients a leaf, until it is written: which is so on some ranks only.
    """
    base = tensor._base
    return (base is not None and base.requires_grad) or not tensor.is_leaf


def check_apart(written: Sequence[tuple[str, torch.Tensor]], read: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
    """Raise `ValueError` if a written tensor shares any element with another of these."""
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
    """Write a result to its tensor, regardless of the mode in which that tensor was created.

    On an accelerator the copy is queued on the current stream, and reads a result in pinned memory later.
    """
    if tensor.data_ptr() != result.data_ptr():
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(result, non_blocking=True)


def view_of(tensor: torch.Tensor) -> memoryview:
    """Bytes of a contiguous tensor on the CPU, which has to outlive the view.

    A slice of it costs a tenth of a slice of the tensor.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_non_overlapping(tensor: torch.Tensor) -> bool:
    """Return whether no two elements share memory."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            # Strides that interleave may still be injective: only counting tells.
            return stride > 0 and _places(tensor, 0).unique().numel() == tensor.numel()
        reach += (size - 1) * stride
    return True


def _places(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The position of each element in memory, counted in elements from `offset` before the first."""
    return torch.arange(_extent(tensor), device="cpu").as_strided(tensor.shape, tensor.stride()).reshape(-1) + offset


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_contiguous() and b.is_contiguous():
        return True
    if a.element_size() != b.element_size() or (b.data_ptr() - a.data_ptr()) % a.element_size():
        return True
    return bool(torch.isin(_places(b, (b.data_ptr() - a.data_ptr()) // a.element_size()), _places(a, 0)).any())
