"""topk: the few numbers with the largest magnitudes, and their indices.

Source: Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from unisono.communicator import Communicator
from unisono.compression.codec import Codec, accumulation_dtype

__all__ = ["CODEC", "Topk"]

_BLOCK = 1 << 16
_MASK = _BLOCK - 1


@dataclass(repr=False, eq=False)
class Topk(Codec):
    """Codec that sends the largest numbers of each block of up to 65536, each as a bfloat16 and a 16-bit index.

    All other numbers count as zero, so use `error_feedback(topk())`. Ties are broken arbitrarily. NaN and infinities
    count as the largest numbers, and so reach every rank's result, at the same index, unless a block has more of them
    than the codec keeps.

    Cost: each rank sends (p-1) times 4 bytes per kept number, in one all_gather.

    Args:
        ratio: Fraction of a block's elements to keep, rounded up; above 0, and at most 1.

    Raises:
        ValueError: `ratio` is at most 0, or above 1.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([0.0, 5.0, 1.0, 0.0]) if comm.rank else torch.tensor([0.0, 1.0, 0.0, -3.0])
        ...     un.compression.topk(ratio=0.25).average(flat, comm, [flat.shape])
        ...     return flat
        >>> un.launch(program, 2, "thread")[0]
        tensor([ 0.0000,  2.5000,  0.0000, -1.5000])
    """

    name = "topk"
    ratio: float = 0.01

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
        blocks, length, count = self._grid(flat.numel())
        coded = self._encode(flat, blocks, length, count)
        arrived = torch.empty((comm.size, *coded.shape), dtype=torch.int16, device=flat.device)
        # Send bytes, because not every backend supports int16.
        comm.all_gather_single(arrived.view(torch.uint8), coded.view(torch.uint8))
        total = torch.zeros(blocks * length, dtype=accumulation_dtype(flat.dtype), device=flat.device)
        starts = torch.arange(0, blocks * length, length, device=flat.device).unsqueeze(1)
        for rank in range(comm.size):
            # Within a rank all indices are distinct, so each element is summed in rank order, and the result is the
            # same on all ranks.
            places, values = _decode(arrived[rank], starts)
            total.index_add_(0, places, values.to(total.dtype).div_(comm.size))
            if rank == comm.rank and kept is not None:
                own = torch.zeros(blocks * length, dtype=flat.dtype, device=flat.device)
                kept.copy_(own.index_copy_(0, places, values.to(flat.dtype))[: flat.numel()])
        flat.copy_(total[: flat.numel()])

    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        if not flat.numel():
            return 0.0
        blocks, length, count = self._grid(flat.numel())
        # In a block of l numbers, the k largest magnitudes account for at least k/l of the sum of squares.
        norm = float(flat.double().norm())
        info = torch.finfo(torch.bfloat16)
        rounding = norm * info.eps / 2 + math.sqrt(blocks * count) * info.smallest_normal * info.eps / 2
        return norm * math.sqrt(1 - count / length) + rounding

    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        if not numel:
            return 0.0
        blocks, _, count = self._grid(numel)
        return 4.0 * (size - 1) * blocks * count

    def _grid(self, numel: int) -> tuple[int, int, int]:
        """Return the number of blocks, their length, and the number of elements to keep per block."""
        blocks = math.ceil(numel / _BLOCK)
        length = math.ceil(numel / blocks)
        return blocks, length, math.ceil(self.ratio * length)

    def _encode(self, flat: torch.Tensor, blocks: int, length: int, count: int) -> torch.Tensor:
        """Return values and indices as a tensor of shape (2, blocks, count)."""
        rows = functional.pad(flat, (0, blocks * length - flat.numel())).view(blocks, length)
        places = rows.abs().topk(count, dim=1, sorted=False).indices
        values = rows.gather(1, places).to(torch.bfloat16)
        return torch.stack((values.view(torch.int16), places.to(torch.int16)))


def _decode(coded: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices in the bucket, and the values."""
    places = (coded[1].to(torch.int64) & _MASK) + starts
    return places.view(-1), coded[0].view(torch.bfloat16).view(-1)


CODEC = Topk
