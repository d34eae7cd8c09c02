"""int4: an eighth of float32's bytes, in steps of a seventh of each block's largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from unisono.compression.codecs.int8 import Int8

__all__ = ["CODEC", "Int4"]


@dataclass(repr=False, eq=False)
class Int4(Int8):
    """Codec that sends four bits per number, and one float32 per block: the block's largest magnitude divided by 7.

    A number changes by up to a fourteenth of its block's largest magnitude, so use `error_feedback(int4())`. Non-finite
    numbers affect their whole block, as with `int8`.

    Args:
        block: Number of elements that share a scale; at least 1.

    Raises:
        ValueError: `block` is less than 1.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([7.0, 1.0, 0.4, -5.4]) * (comm.rank + 1)
        ...     un.compression.int4().average(flat, comm, [flat.shape])
        ...     return flat
        >>> un.launch(program, 1, "thread")[0]
        tensor([ 7.,  1.,  0., -5.])
    """

    name = "int4"
    block: int = 256
    # A byte encodes two numbers, one from each half of a piece. A multiple of 8 elements takes a multiple of 4 bytes,
    # which keeps the float32 scales of pieces aligned.
    multiple: ClassVar[int] = 8
    steps: ClassVar[int] = 7

    def pack(self, steps: torch.Tensor, coded: torch.Tensor) -> None:
        low, high = steps.chunk(2, dim=1)
        coded.copy_(high.mul(16).add_(low).add_(8 * 17))

    def unpack(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        low, high = out.chunk(2, dim=1)
        low.copy_(coded & 15).sub_(8)
        high.copy_(coded >> 4).sub_(8)

    def piece_bytes(self, blocks: int, length: int) -> int:
        return blocks * (4 + length // 2)


CODEC = Int4
