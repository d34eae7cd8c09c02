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
    """Codec that sends the sign of each number, and one float32 per block: the mean of the block's magnitudes.

    Provisional: it may change in any minor version, without a deprecation.

    A single average has a large error, so use `error_feedback(onebit())`. Zero counts as positive, except in a block of
    only zeros. A NaN or an infinity makes its whole block non-finite, on every rank. In float64 buckets, so does a mean
    magnitude beyond float32's range.

    Args:
        block: Number of elements that share a magnitude; at least 1.

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
    # 32 sign bits are 4 bytes, so blocks fill whole bytes, and the float32 magnitudes stay aligned.
    multiple: ClassVar[int] = 32

    def encode(self, pieces: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        count, blocks, length = pieces.shape
        signs = pack_signs(pieces.view(-1)).view(count, -1)
        magnitudes = pieces.abs_()
        sums = magnitudes.sum(-1, keepdim=True)
        if not bool(sums.isfinite().all()):
            # The sum may overflow even if the mean does not. Use float64 only if a sum is not finite, because float64
            # takes three times as long.
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
        # The encoded block is the orthogonal projection of the block onto its signs, so the norm of the encoding error
        # follows from the Pythagorean theorem. The mean magnitude is at least norm / count.
        mean = torch.maximum(mean, norm / count)
        return (norm.square() - count * mean.square()).clamp_(min=0).sqrt() + norm * 1e-6


CODEC = Onebit


_GATHER = 0x0102040810204080
"""Factor that packs bits: the product with eight bytes of 0 or 1, read as one integer, has the bits in its top byte."""


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Return one bit per value, 1 unless the value is negative, packed into a uint8 tensor of an eighth of the length.

    Args:
        values: One-dimensional, contiguous, with a multiple of 8 elements.

    Example:
        >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, -1.0, -1.0, -1.0, -1.0, 2.0]))
        tensor([133], dtype=torch.uint8)
    """
    eights = (values >= 0).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_signs(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write 1 for each set bit and -1 for each clear bit to `out`, and return `out`.

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
    """Return a table with the eight signs for each value of a byte."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return (2 * bits - 1).to(dtype)
