"""randomk: values at a few random indices; all ranks draw the same indices, so only values are sent.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.communicator import Communicator
from unisono.compression.codec import SteppedCodec

__all__ = ["CODEC", "Randomk"]


@dataclass(repr=False, eq=False)
class Randomk(SteppedCodec):
    """Codec that splits a bucket into stretches of nearly equal length, and sends one random element of each.

    Provisional: it may change in any minor version, without a deprecation.

    Each call draws new elements, and sends them in the bucket's dtype. All other elements count as zero, and the sent
    elements are not scaled up to compensate, so use `error_feedback(randomk())`. A NaN or an infinity anywhere makes
    the whole result NaN on every rank, so that it is detected even if it is not drawn.

    Cost: one all_reduce of the kept elements.

    Args:
        ratio: Fraction of the elements to keep, rounded up; above 0, and at most 1.
        seed: Seed of the draws; the same on all ranks.

    Raises:
        ValueError: `ratio` is at most 0, or above 1.

    Example:
        >>> def program(comm):
        ...     flat = torch.full((8,), comm.rank + 1.0)
        ...     un.compression.randomk(ratio=0.25).average(flat, comm, [flat.shape])
        ...     return flat.sort().values
        >>> un.launch(program, 2, "thread")[0]
        tensor([0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 1.5000, 1.5000])
    """

    name = "randomk"
    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, not {self.ratio}")

    def average(
        self,
        flat: torch.Tensor,
        comm: Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        self.prepare(flat, comm, shapes, kept)
        if not flat.numel():
            return
        places = self._places(flat.numel()).to(flat.device)
        # `sent[-1]` is 0, or NaN if any number in the bucket is not finite. Elements that were not drawn get the value
        # of `sent[-1]`.
        sent = torch.empty(places.numel() + 1, dtype=flat.dtype, device=flat.device)
        torch.index_select(flat, 0, places, out=sent[:-1])
        low, high = flat.aminmax()
        sent[-1] = (low * 0 + high * 0).abs()
        if kept is not None:
            kept.copy_(sent[-1].expand_as(kept)).index_copy_(0, places, sent[:-1])
        comm.all_reduce(sent.div_(comm.size), algorithm="fewest_bytes")
        flat.copy_(sent[-1].expand_as(flat)).index_copy_(0, places, sent[:-1])
        self._step += 1

    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        if not flat.numel():
            return 0.0
        # In the worst case, the draw picks the element of smallest magnitude in each stretch of the bucket.
        starts = self._starts(flat.numel())
        squares = flat.double().square()
        smallest = sum(float(part.min()) for part in squares.tensor_split(starts[1:-1]))
        return math.sqrt(max(0.0, float(squares.sum()) - smallest))

    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        if not numel:
            return 0.0
        return 2 * (size - 1) / size * itemsize * (math.ceil(self.ratio * numel) + 1)

    def _starts(self, numel: int) -> torch.Tensor:
        """Return the start index of each stretch, and the end of the last stretch."""
        count = math.ceil(self.ratio * numel)
        return torch.arange(count + 1) * numel // count

    def _places(self, numel: int) -> torch.Tensor:
        """Draw one index in each stretch. Shuffling the whole bucket would cost more than sending it."""
        starts = self._starts(numel)
        drawn = torch.rand(len(starts) - 1, generator=self.generator(), dtype=torch.float64)
        return starts[:-1] + (drawn * starts.diff()).long()


CODEC = Randomk
