"""Single safetensors files: a flat dict of tensors, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.errors import FormatError
from unisono.host.distribution import required

__all__ = ["SUFFIXES", "read", "recognises", "write"]

SUFFIXES = (".safetensors",)


def recognises(path: Path) -> bool:
    """Return whether the path is a file with the suffix `.safetensors`."""
    return path.is_file() and path.suffix in SUFFIXES


def read(path: Path, trusted: bool) -> Any:
    """Return the tensors by name. `trusted` is ignored, because the format cannot contain code."""
    return _package().load_file(path)


def write(path: Path, state: Any) -> None:
    """Write every tensor in the state under its path, such as `model.weight`; omit all other values."""
    tensors: dict[str, torch.Tensor] = {}
    _collect(state, "", tensors)
    _package().save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )


def _package() -> Any:
    """Return `safetensors.torch`, an optional dependency because it has no wheels for free-threaded Python."""
    return required("safetensors.torch", "such a file needs safetensors", "safetensors")


def _collect(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise FormatError(f"two tensors of the state would both be called {path!r} in a safetensors file")
        tensors[path or "state"] = value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _collect(item, f"{path}.{key}" if path else str(key), tensors)
