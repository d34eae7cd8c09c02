"""onebit: a sign per number and a magnitude per block, 1/31 of float32's bytes.

Sources: Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014; in two stages as in Tang et al., "1-bit Adam: communication
efficient large-scale training with Adam's convergence speed", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from unisono.compression.two_stage import TwoStage

__all__ = ["CODEC", "Onebit", "pack_signs", "unpack_signs"]


@dataclass(repr=False, eq=False)
class Onebit(TwoStage):
    """Codec that sends the sign of each number, and for each block one float32: the mean of its magnitudes.

    Provisional: it may change in any minor version, without a deprecation.

    A single average loses much, so use `error_feedback(onebit())`. Zero counts as positive, except in a block of
    only zeros. A block with a NaN or an infinity (in float64: anything beyond float32's range) becomes
    non-finite as a whole, on every rank.

    Args:
        block: Elements that share a magnitude, at least 1.

    Raises:
        ValueError: `block` is less than 1.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([3.0, -1.0, 2.0, -2.0])
        ...     un.compression.onebit().average(flat, comm, [flat.shape])
        ...     return flat
        >>> un.launch(program, 1, "thread")[0]
        tensor([ 2., -2.,  2., -2.])
    """

    name = "onebit"
    block: int = 1024
    # So that bits fill whole bytes, and magnitudes are aligned for float32.
    multiple: ClassVar[int] = 32

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"a block must have at least one element, not {self.block}")

    def encode(self, pieces: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        count, blocks, length = pieces.shape
        signs = pack_signs(pieces.view(-1)).view(count, -1)
        magnitudes = pieces.abs_()
        sums = magnitudes.sum(-1, keepdim=True)
        if not bool(sums.isfinite().all()):
            # A sum may overflow where the mean does not; always summing in float64 takes three times as long.
            sums = magnitudes.sum(-1, keepdim=True, dtype=torch.float64)
        scales = (sums / counts).float()
        coded = torch.empty(count, self.piece_bytes(blocks, length), dtype=torch.uint8, device=pieces.device)
        coded[:, : 4 * blocks] = scales.view(count, blocks).view(torch.uint8)
        coded[:, 4 * blocks :] = signs
        return coded

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        blocks = out.shape[1]
        scales = coded[:, : 4 * blocks].view(torch.float32)
        unpack_signs(coded[:, 4 * blocks :].reshape(-1), out.view(-1))
        return out.mul_(scales.unsqueeze(-1))

    def piece_bytes(self, blocks: int, length: int) -> int:
        return blocks * (4 + length // 8)

    def loss(self, norm: torch.Tensor, largest: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        # By Pythagoras: signs times the mean magnitude are the projection onto the signs. No mean is below norm /
        # count.
        mean = torch.maximum(mean, norm / count)
        return (norm.square() - count * mean.square()).clamp_(min=0).sqrt() + norm * 1e-6


CODEC = Onebit


_GATHER = 0x0102040810204080
"""Multiplied by eight bytes of 0 or 1 as one integer: the highest byte of the product has each of them as a bit."""


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Return one bit per value, 1 unless it is negative: uint8, an eighth of the length.

    Args:
        values: One-dimensional, contiguous, with a multiple of 8 elements.

    Example:
        >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, -1.0, -1.0, -1.0, -1.0, 2.0]))
        tensor([133], dtype=torch.uint8)
    """
    eights = (values >= 0).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_signs(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write 1 for each set bit, and -1 for the others, to `out`, and return that.

    Args:
        packed: One-dimensional, uint8.
        out: One-dimensional and contiguous, eight times as long, of a floating-point dtype.

    Example:
        >>> unpack_signs(torch.tensor([133], dtype=torch.uint8), torch.empty(8))
        tensor([ 1., -1.,  1., -1., -1., -1., -1.,  1.])
    """
    torch.index_select(_table(out.dtype, out.device), 0, packed.to(torch.int32), out=out.view(-1, 8))
    return out


@lru_cache(maxsize=16)
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The signs of each byte."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return (2 * bits - 1).to(dtype)
