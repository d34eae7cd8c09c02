"""Two-stage codecs: each rank decodes and sums one piece of every rank's bucket, and sends the encoded sum to all.

The stages are a reduce-scatter and an all-gather; in each, a rank sends one message to every peer. Pieces are decoded
before they are added, so a codec need not support sums of encoded data, and each rank knows every compression error
that its own encoding causes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from unisono.communicator import Communicator
from unisono.compression.codec import Codec, accumulation_dtype

__all__ = ["HalfPrecision", "TwoStage"]


class TwoStage(Codec):
    """Base class of block codecs. A subclass defines `encode`, `decode`, `piece_bytes` and an error bound, `loss`.

    A bucket is cut into p pieces, one per rank. All pieces have the same number of blocks, and all blocks the same
    length, at most `block`; the end of the bucket is padded with zeros. Cost: each rank sends 2(p-1)/p of the encoded
    bucket in two rounds, and needs memory for up to two more buckets during a call.

    Attributes:
        block: Maximum number of elements that are encoded together.
        multiple: Every block's length is a multiple of this number.
    """

    block: int
    multiple: ClassVar[int] = 1

    def __post_init__(self) -> None:
        # Dataclasses call this.
        if self.block < 1:
            raise ValueError(f"a block must have at least one element, not {self.block}")

    @abstractmethod
    def encode(self, pieces: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return some pieces encoded as bytes.

        Args:
            pieces: Tensor of shape (pieces, blocks, length), float32 or float64, contiguous; may be overwritten.
            counts: Number of elements in each block without padding, at least 1; of shape (pieces, blocks, 1).

        Returns:
            uint8, of shape (pieces, bytes), contiguous.

        Example:
            >>> codec, piece = un.compression.int8(), torch.tensor([[[254.0, -4.0, 0.0, 1.5]]])
            >>> coded = codec.encode(piece, counts=torch.tensor([[[4]]]))
            >>> coded.shape[1] == codec.piece_bytes(blocks=1, length=4)
            True
            >>> codec.decode(coded, out=torch.empty(1, 1, 4))
            tensor([[[254.,  -4.,   0.,   2.]]])
        """

    @abstractmethod
    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decode the output of `encode`; the result differs from `encode`'s input by the compression error.

        Args:
            coded: Output of `encode`, as received.
            out: Contiguous tensor to write to, with the shape and dtype that `pieces` had in `encode`.

        Returns:
            `out`.
        """

    @abstractmethod
    def piece_bytes(self, blocks: int, length: int) -> int:
        """Return the number of bytes of an encoded piece.

        Args:
            blocks: Number of blocks in the piece.
            length: Number of elements in a block.
        """

    @abstractmethod
    def loss(self, norm: torch.Tensor, largest: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Bound the error of each block after `encode` and `decode`. All tensors have one element per block.

        Args:
            norm: Upper bound on the block's Euclidean norm, float64.
            largest: Upper bound on the block's largest magnitude, float64.
            mean: Lower bound on the mean of the block's magnitudes, float64.
            count: Number of elements in the block, without padding.

        Returns:
            Upper bound on the Euclidean norm of the error; infinite if decoding may give non-finite numbers.
        """

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
        pieces, counts = self._cut(flat, comm.size)
        coded = self.encode(pieces, counts)
        # `encode` may have overwritten `pieces`, which from here on is only a buffer for decoded data.
        if kept is not None:
            kept.copy_(self.decode(coded, pieces).mul_(comm.size).view(-1)[: flat.numel()])
        arrived = torch.empty_like(coded)
        comm.all_to_all_single(arrived, coded)
        total = self.decode(arrived, pieces)[0]
        for piece in pieces[1:]:
            total += piece
        # Reset the padding: it may decode to non-zero numbers, which would affect the next encoding.
        total.view(-1)[max(0, flat.numel() - comm.rank * total.numel()) :] = 0
        lost = None if kept is None else total.clone()
        own = slice(comm.rank, comm.rank + 1)
        comm.all_gather_single(coded, self.encode(total.unsqueeze(0), counts[own]))
        result = self.decode(coded, pieces)
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result.view(-1)[: flat.numel()])
        if kept is not None and lost is not None:
            _book(kept, lost.neg_().add_(result[comm.rank]), comm.rank, comm.size)

    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        if not numel:
            return 0.0
        return 2.0 * (size - 1) * self.piece_bytes(*self._grid(numel, size))

    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        if not flat.numel():
            return 0.0
        size = 1 + len(others)
        norm_of_all = largest_of_all = first = torch.zeros(())
        for tensor in (*others, flat):
            pieces, count = self._cut(tensor.to(torch.float64, copy=True), size)
            magnitudes = pieces.abs()
            norm = magnitudes.norm(dim=-1, keepdim=True)
            largest = magnitudes.amax(-1, keepdim=True)
            first = self.loss(norm, largest, magnitudes.sum(-1, keepdim=True) / count, count)
            norm_of_all = norm_of_all + norm + first
            largest_of_all = largest_of_all + largest + first
        second = self.loss(norm_of_all, largest_of_all, torch.zeros_like(first), count)
        # A piece's second-stage error arises only on the rank that sums the piece, so the error bound includes only the
        # largest second-stage error of any piece.
        return size * float(first.norm() + second.flatten(1).norm(dim=1).max())

    def _grid(self, numel: int, size: int) -> tuple[int, int]:
        """Return the number of blocks in a piece, and their length."""
        piece = math.ceil(numel / size)
        blocks = math.ceil(piece / self.block)
        return blocks, math.ceil(piece / blocks / self.multiple) * self.multiple

    def _cut(self, flat: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's share of the mean, cut into pieces, and each block's number of elements without padding.

        The pieces use flat's memory if no padding or conversion is needed. Elements are divided by the number of ranks
        before they are summed, so that the sums cannot overflow.
        """
        blocks, length = self._grid(flat.numel(), size)
        total = size * blocks * length
        dtype = accumulation_dtype(flat.dtype)
        if total == flat.numel() and dtype == flat.dtype:
            shares = flat.div_(size)
        else:
            shares = torch.empty(total, dtype=dtype, device=flat.device)
            torch.div(flat.to(dtype), size, out=shares[: flat.numel()])
            shares[flat.numel() :].zero_()
        starts = torch.arange(0, total, length, device=flat.device)
        counts = (flat.numel() - starts).clamp_(1, length)
        return shares.view(size, blocks, length), counts.view(size, blocks, 1)


def _book(kept: torch.Tensor, error: torch.Tensor, rank: int, size: int) -> None:
    """To this rank's piece of `kept`, add the second stage's error in the mean, times the number of ranks."""
    mine = kept[rank * error.numel() : (rank + 1) * error.numel()]
    mine += error.view(-1)[: mine.numel()].mul_(size).to(mine.dtype)


class HalfPrecision(TwoStage):
    """Codec that sends every number in the dtype `half`.

    Sums are computed in float32 (float64 for float64 buckets), and rounded once.

    An all_reduce in half precision would round at every addition, and no rank's `kept` would account for that loss; see
    `Codec.average`.
    """

    half: ClassVar[torch.dtype]
    block = 1 << 62

    def encode(self, pieces: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return pieces.to(self.half).view(torch.uint8).flatten(1)

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(coded.view(self.half).view(out.shape))

    def piece_bytes(self, blocks: int, length: int) -> int:
        return 2 * blocks * length

    def loss(self, norm: torch.Tensor, largest: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        info = torch.finfo(self.half)
        rounded = norm * (info.eps / 2 * 1.001) + count.sqrt() * (info.smallest_normal * info.eps / 2)
        return torch.where(largest > info.max, torch.inf, rounded)
