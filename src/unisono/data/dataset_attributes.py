"""Per-sample attributes of a dataset: labels, groups, costs."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["codes", "digest", "numbers", "of_dataset"]


def of_dataset(dataset: Any, names: Sequence[str], partitioner: str) -> Any:
    """Return the first of these attributes that a dataset has; for a subset, only the values of the subset's samples.

    If the dataset has none of the attributes, raises a `ValueError` that says how to pass the values explicitly.
    """
    for name in names:
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return found
    inner = getattr(dataset, "dataset", getattr(dataset, "data", None))
    indices = getattr(dataset, "indices", None)
    if inner is not None and indices is not None:
        values = of_dataset(inner, names, partitioner)
        positions = torch.as_tensor(indices).tolist()
        return (
            values[torch.tensor(positions)]
            if isinstance(values, torch.Tensor)
            else [values[position] for position in positions]
        )
    raise ValueError(
        f"a {type(dataset).__name__} has no {' or '.join(names)} for {partitioner!r}; "
        f"pass them: partition=un.data.{partitioner}({names[-1]})"
    )


def codes(values: Iterable[Any], name: str) -> torch.Tensor:
    """Replace values with integers from 0: in sorted order for tensors, otherwise in the order of first occurrence."""
    if isinstance(values, torch.Tensor):
        given = values.detach().to("cpu")
        if given.dim() != 1:
            raise ValueError(f"{name} must be one for each sample, but have the shape {tuple(given.shape)}")
        return given.unique(return_inverse=True)[1] if len(given) else given.long()
    known: dict[Any, int] = {}
    items = (value.item() if isinstance(value, torch.Tensor) else value for value in values)
    return torch.tensor([known.setdefault(value, len(known)) for value in items], dtype=torch.int64, device="cpu")


def numbers(values: Iterable[float] | torch.Tensor, name: str) -> torch.Tensor:
    """Convert values to one float64 per sample. Raises `ValueError` unless all values are finite and non-negative."""
    listed = values if isinstance(values, torch.Tensor) else list(values)
    given = torch.as_tensor(listed, dtype=torch.float64, device="cpu").detach()
    if given.dim() != 1:
        raise ValueError(f"{name} must be one for each sample, but have the shape {tuple(given.shape)}")
    wrong = (~given.isfinite() | (given < 0)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(f"{name} must be finite and 0 or more, but that of sample {first} is {given[first].item()}")
    return given


def digest(values: torch.Tensor) -> str:
    """Return a digest of these values; saved states contain this digest, and loading a state compares it."""
    held = values.contiguous()
    return hashlib.blake2b(
        (ctypes.c_char * held.nbytes).from_address(held.data_ptr()) if held.nbytes else b"", digest_size=8
    ).hexdigest()
