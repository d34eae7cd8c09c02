"""The buckets of an averager: how parameters are assigned to buckets, and the buckets' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from unisono.communicator import Communicator
from unisono.core.tensors import HALVES
from unisono.errors import AbortedError
from unisono.gradients.bucket import GradientBucket
from unisono.utils.flatten import bucket_sizes, plan_buckets
from unisono.utils.parameters import Named
from unisono.utils.replaceable_comms import ReplaceableComms

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["Buckets", "codec_for"]


def codec_for(compression: str | Codec | Callable[[], Codec] | None) -> Codec | None:
    """Return the codec for a user's `compression` argument."""
    if compression is None:
        return None
    from unisono.compression.codec import resolve

    return resolve(compression)


class Buckets:
    """Buckets of an averager, in the order in which all ranks reduce them. The buckets persist from step to step.

    Args:
        named: All parameters, with their names.
        caller_comm: The caller's communicator, over which ranks agree on default sizes. Construction is collective.
        comms: Communicators; `data` is used for reducing the buckets and nothing else.
        codec: Codec that is cloned for each bucket of real numbers; None to send gradients uncompressed.
        sizes: Maximum bytes in a bucket, and in the first bucket; None for defaults.

    Attributes:
        comms: The communicators that were passed.
        ordered: The buckets.
        where: For each parameter that has a bucket, the bucket's index in `ordered`, and the parameter's slot.
        background: Whether buckets are sent while others are still being filled.
        codec: The codec that was passed.
        comm: The communicator for which the memory was allocated. After a failed pass, `comms.data` may be a new
            communicator.
    """

    def __init__(
        self,
        named: Named,
        caller_comm: Communicator,
        comms: ReplaceableComms,
        codec: Codec | None,
        sizes: tuple[int | None, int | None],
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self.comms: ReplaceableComms = comms
        self.codec = codec
        self.comm: Communicator = comms.data
        self.background: bool = self.comm.overlaps and codec is None
        self._cap, self._first = bucket_sizes(
            sizes, self._parameters, caller_comm, background=self.background, compressed=codec is not None
        )
        self.ordered: list[GradientBucket] = []
        self.where: dict[int, tuple[int, int]] = {}
        self._codecs: dict[tuple[int, ...], Codec] = {}

    def add(self, order: Sequence[int]) -> None:
        """Append buckets for these parameters. Collective."""
        for indices in plan_buckets(self._parameters, order, self._cap, None if self.ordered else self._first):
            members = [self._parameters[i] for i in indices]
            first = self._names[indices[0]]
            last = self._names[indices[-1]]
            name = repr(first) if first == last else f"{first!r} to {last!r}"
            like = members[0]
            memory = self._allocate(GradientBucket.length(members), like.dtype, like.device)
            self.where.update((index, (len(self.ordered), slot)) for slot, index in enumerate(indices))
            self.ordered.append(GradientBucket(indices, members, memory, self._scale(like.dtype), name))

    def rearrange(self, seen: Iterable[int]) -> None:
        """Reorder the parameters by the arrival of their gradients, with parameters without a gradient at the end.

        Collective.
        """
        order = list(dict.fromkeys([*(i for i in seen if i in self.where), *self.where]))
        # All ranks pass the same order, so either all ranks recreate the buckets or none does.
        if order != list(self.where):
            self.recreate(order)

    def recreate(self, order: Sequence[int]) -> None:
        """Replace all buckets with buckets for these parameters, in the current communicator's memory. Collective."""
        self.clear()
        self.comm = self.comms.data
        self.add(order)

    def clear(self) -> None:
        """Drop all buckets."""
        self.ordered.clear()
        self.where.clear()

    def _scale(self, dtype: torch.dtype) -> float:
        """Factor applied to each contribution as it is copied into a bucket of this dtype."""
        # Half-precision gradients are divided before they are summed. Division by a power of two is exact, and costs
        # less if done during the copy.
        first = dtype in HALVES and self.codec is None and self.comms.size.bit_count() == 1
        return 1 / self.comms.size if self.background or first else 1.0

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the kind of memory that the backend reduces fastest. Collective."""
        if device.type == "cpu":
            # If a failed pass has aborted the communicator, use plain memory until the communicator is replaced.
            with suppress(AbortedError):
                return self.comms.data.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def names_of(self, bucket: GradientBucket) -> list[str]:
        """Return the names of a bucket's parameters."""
        return [self._names[index] for index in bucket.indices]

    def codec_of(self, bucket: GradientBucket) -> Codec | None:
        """Return the bucket's own codec, if it has one."""
        if self.codec is None or not bucket.flat.is_floating_point():
            return None
        # Codecs are stored by parameter indices and not in the bucket, because their residuals must survive a rebuild
        # of the buckets.
        if bucket.indices not in self._codecs:
            self._codecs[bucket.indices] = self.codec.clone()
        return self._codecs[bucket.indices]

    def within(self, held: Iterable[tuple[int, torch.Tensor]]) -> set[int]:
        """Return the indices of the gradients that are stored in the buckets' memory, each in its own slot.

        Args:
            held: Pairs of a parameter's index and its p.grad.

        Raises:
            RuntimeError: A gradient is stored in the slot of another parameter, whose mean would overwrite it.
        """
        return {index for index, grad in held if self._is_within(index, grad)}

    def _is_within(self, index: int, grad: torch.Tensor) -> bool:
        number, slot = self.where.get(index, (None, 0))
        if number is not None and self.ordered[number].is_place(slot, grad):
            return True
        if not any(bucket.holds(grad) for bucket in self.ordered):
            return False
        raise RuntimeError(
            f"p.grad of {self._names[index]!r} is memory of the averager for other gradients: it was taken from "
            "another parameter, or is a slice or transpose of its own. Assign a clone() instead"
        )
