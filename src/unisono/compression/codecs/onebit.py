"""onebit: a sign for each number and a magnitude for each block, 1/31 of float32's bytes.

Sources: Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014; in two stages as in Tang et al., "1-bit Adam: communication
efficient large-scale training with Adam's convergence speed", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from unisono.compression.sign_packing import pack_signs, unpack_signs
from unisono.compression.two_stage import TwoStage

__all__ = ["CODEC", "Onebit"]


@dataclass(repr=False, eq=False)
class Onebit(TwoStage):
    """Codec that sends the sign of each number, and for each block one float32: the mean of its magnitudes.

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
    # So that bits fill bytes, and magnitudes are aligned as float32 numbers.
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
        # Pythagoras: signs times the mean magnitude are the projection onto the signs. No mean is below norm / count.
        mean = torch.maximum(mean, norm / count)
        return (norm.square() - count * mean.square()).clamp_(min=0).sqrt() + norm * 1e-6


CODEC = Onebit
