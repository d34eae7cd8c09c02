"""Numbers of 16 bits on the wire, whatever they were before."""

from __future__ import annotations

import torch

from unisono.compression.two_stage import TwoStage

__all__ = ["HalfPrecision"]


class HalfPrecision(TwoStage):
    """Codec that sends every number as `half`. Sums are computed in float32 (of float64: in float64), and rounded once.

    An all_reduce of halves would round at every addition, and no rank would book that loss: see `Codec.average`.
    """

    half: torch.dtype
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
