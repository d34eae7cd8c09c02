"""Codec interface: average one flat bucket over all ranks, and send less than all of it."""

from __future__ import annotations

import copy
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Self

import torch

from unisono.communicator import Communicator
from unisono.errors import MismatchError

__all__ = ["DTYPES", "Codec", "accumulation_dtype", "check_bucket"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What a bucket may consist of."""


class Codec(ABC):
    """Averages one flat bucket over all ranks, sending less than all of it. One object a bucket; `clone` makes more.

    A new codec is one file in `unisono.compression.codecs` that ends in `CODEC = YourCodec`, or an entry point
    of that name in another package. It calls `prepare` first of all in `average`, and shows its settings in
    its `repr`, which all ranks compare. `unisono.testing.codecs` has the laws that it must meet.

    Attributes:
        name: By which it is found.
    """

    name: ClassVar[str]
    _agreed: tuple[weakref.ref[Communicator], object] | None = None

    @abstractmethod
    def average(
        self,
        flat: torch.Tensor,
        comm: Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        """Replace this rank's contribution by the mean over ranks of what was kept of each contribution.

        Collective. In place, bit for bit the same on all ranks.

        The mean over ranks of `kept` is the result, up to rounding of the bucket's dtype: a loss after
        contributions were summed is booked p times by the rank that caused it, so that error feedback misses
        nothing. A single-rank world has the same losses.

        Args:
            flat: One-dimensional, contiguous, of float16, bfloat16, float32 or float64.
            comm: The ranks that average.
            shapes: Shapes of the parameters that `flat` stores one after another.
            kept: If given, set to what was kept of this rank's contribution; of flat's shape and dtype.

        Raises:
            MismatchError: Ranks compress in different ways, or different buckets.
            TypeError, ValueError: The arguments are not as described; nothing was sent.
        """

    def average_masked(
        self, flat: torch.Tensor, comm: Communicator, shapes: Sequence[torch.Size], used: Sequence[bool]
    ) -> None:
        """Average a bucket as `average` does, where the means of some parameters are not going to be read.

        Args:
            flat: As for `average`; 0 where parameters are not used.
            comm: As for `average`.
            shapes: As for `average`.
            used: For each shape whether its parameter is used; the same on all ranks.
        """
        self.average(flat, comm, shapes)

    @abstractmethod
    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        """The most that the Euclidean norm of `flat - kept` can be, at first use.

        Args:
            flat: This rank's contribution.
            others: Those of the other ranks, in any order: a second stage's loss depends on them.
            shapes: As for `average`.
        """

    @abstractmethod
    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        """Bytes that one rank sends for one average, the mean over ranks.

        An all_reduce counts as 2(p-1)/p of its message, the least possible. The first average of a bucket
        also sends 8 bytes to each other rank, to agree.

        Args:
            numel: Elements in the bucket.
            shapes: As for `average`.
            size: How many ranks.
            itemsize: Bytes of an element in the bucket.
        """

    def clone(self) -> Self:
        """A fresh codec of the same settings, for another bucket."""
        fresh = copy.deepcopy(self)
        fresh.reset()
        return fresh

    def reset(self) -> None:
        """Forget what earlier averages left behind."""
        self._agreed = None

    def state_dict(self) -> dict[str, Any]:
        """State left by earlier averages: tensors, numbers, strings and containers of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of another codec. Every rank loads its own.

        Raises:
            ValueError: It is of another kind of codec.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"the state of {self!r} has {sorted(self.state_dict())}, not {sorted(state)}")
        self._agreed = None

    def shared_state(self) -> object:
        """The part of the state that must be equal on all ranks."""
        return None

    def prepare(
        self,
        flat: torch.Tensor,
        comm: Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        """Check the arguments of `average`; on the first call also that they match on all ranks."""
        check_bucket(flat, shapes, kept)
        bucket = (flat.dtype, tuple(shapes))
        if self._agreed is None or self._agreed[0]() is not comm or self._agreed[1] != bucket:
            sizes = [tuple(shape) for shape in shapes]
            _agree(comm, f"{self!r} at {self.shared_state()} on {flat.dtype} of {sizes}", flat.device)
            self._agreed = (weakref.ref(comm), bucket)

    def __repr__(self) -> str:
        names: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        return f"{self.name}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __getstate__(self) -> dict[str, Any]:
        # Copies belong to other buckets or processes: the agreement does not hold for them.
        return {key: value for key, value in self.__dict__.items() if key != "_agreed"}


def check_bucket(flat: torch.Tensor, shapes: Sequence[torch.Size], kept: torch.Tensor | None = None) -> None:
    """`TypeError` or `ValueError` for what is not a bucket of these shapes."""
    for name, tensor in (("flat", flat), ("kept", kept)):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is of {tensor.dtype}; gradients of floating-point numbers are compressed")
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.requires_grad:
            raise ValueError(
                f"{name} must be one-dimensional, contiguous and detached, not of shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}, requires_grad={tensor.requires_grad}"
            )
    total = sum(math.prod(shape) for shape in shapes)
    if total != flat.numel():
        raise ValueError(f"the shapes have {total} elements in all, but flat has {flat.numel()}")
    if kept is None:
        return
    if (kept.dtype, kept.numel(), kept.device) != (flat.dtype, flat.numel(), flat.device):
        raise ValueError(
            f"kept must be like flat, {flat.numel()} of {flat.dtype} on {flat.device}, "
            f"not {kept.numel()} of {kept.dtype} on {kept.device}"
        )
    if flat.numel() and abs(kept.data_ptr() - flat.data_ptr()) < flat.nbytes:
        raise ValueError("kept and flat share memory; pass tensors of their own")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of this dtype are computed.

    Example:
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def _agree(comm: Communicator, text: str, device: torch.device) -> None:
    """Raise `MismatchError` on every rank unless all pass the same text."""
    if comm.size == 1:
        return
    digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    said = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.all_gather_single(said, torch.tensor([digest], device=device))
    if bool((said == digest).all()):
        return
    texts = comm.all_gather_object(text)
    other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
    raise MismatchError(
        f"ranks compress differently: rank 0 {texts[0]}; rank {other} {texts[other]}. They must be equal",
        rank=comm.rank,
        size=comm.size,
    )
