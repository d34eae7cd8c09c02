"""int8: a quarter of float32's bytes, in steps of 1/127 of each block's largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from unisono.compression.two_stage import TwoStage

__all__ = ["CODEC", "Int8"]

_TINY = 2.0**-149


@dataclass(repr=False, eq=False)
class Int8(TwoStage):
    """Codec that sends one byte per number, and one float32 per block: the block's largest magnitude divided by 127.

    A NaN or an infinity makes its whole block non-finite, on every rank. In float64 buckets, so does a scale beyond
    float32's range.

    Args:
        block: Number of elements that share a scale; at least 1.

    Attributes:
        steps: Number of steps from zero to a block's largest magnitude.

    Raises:
        ValueError: `block` is less than 1.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([127.0, 1.0, 0.4]) * (comm.rank + 1)
        ...     un.compression.int8().average(flat, comm, [flat.shape])
        ...     return flat
        >>> un.launch(program, 1, "thread")[0]
        tensor([127.,   1.,   0.])
    """

    name = "int8"
    block: int = 1024
    # A multiple of 4 elements takes a multiple of 4 bytes, which keeps the float32 scales of pieces aligned.
    multiple: ClassVar[int] = 4
    steps: ClassVar[int] = 127

    def encode(self, pieces: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        count, blocks, length = pieces.shape
        high = pieces.amax(-1, keepdim=True)
        low = pieces.amin(-1, keepdim=True)
        scales = torch.maximum(high, low.neg_()).div_(self.steps).float()
        # If a scale has underflowed to 0, encode its block as zeros. Divide instead of multiplying by 1 / scale, which
        # could overflow.
        steps = pieces.div_(scales.masked_fill(scales == 0, torch.inf)).round_().clamp_(-self.steps, self.steps)
        coded = torch.empty(count, self.piece_bytes(blocks, length), dtype=torch.uint8, device=pieces.device)
        coded[:, : 4 * blocks] = scales.view(count, blocks).view(torch.uint8)
        self.pack(steps.view(count, -1), coded[:, 4 * blocks :])
        return coded

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        pieces, blocks, _ = out.shape
        scales = coded[:, : 4 * blocks].view(torch.float32)
        self.unpack(coded[:, 4 * blocks :], out.view(pieces, -1))
        return out.mul_(scales.unsqueeze(-1))

    def pack(self, steps: torch.Tensor, coded: torch.Tensor) -> None:
        """Write integers as bytes.

        Args:
            steps: Integers with magnitudes of at most the codec's `steps`, or NaN, of shape (pieces, elements); may be
                overwritten.
            coded: Tensor to write to, uint8, of shape (pieces, bytes).

        Example:
            >>> codec, coded, out = un.compression.int4(), torch.empty(1, 1, dtype=torch.uint8), torch.empty(1, 2)
            >>> codec.pack(torch.tensor([[3.0, -7.0]]), coded)
            >>> codec.unpack(coded, out)
            >>> out
            tensor([[ 3., -7.]])
        """
        coded.view(torch.int8).copy_(steps)

    def unpack(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        """Read the numbers written by `pack`.

        Args:
            coded: Output of `pack`.
            out: Tensor to write to, with the shape and dtype of the numbers.

        Example:
            >>> codec, out = un.compression.int8(), torch.empty(1, 2)
            >>> codec.unpack(torch.tensor([[5, 255]], dtype=torch.uint8), out)
            >>> out
            tensor([[ 5., -1.]])
        """
        out.copy_(coded.view(torch.int8))

    def piece_bytes(self, blocks: int, length: int) -> int:
        return blocks * (4 + length)

    def loss(self, norm: torch.Tensor, largest: torch.Tensor, mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        # The loss is at most half a quantization step per element, plus the scale's rounding error, which matters if
        # the scale is subnormal.
        return count.sqrt() * (largest * (0.5 / self.steps * (1 + 1e-4)) + 128 * _TINY)


CODEC = Int8
