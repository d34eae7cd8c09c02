"""Helpers for training scripts: seeds, gradient norms, logging, throughput, and averages of parameters."""

from typing import TYPE_CHECKING

from unisono.core.lazy import load_on_use

if TYPE_CHECKING:
    from unisono.utils.ema import EMA
    from unisono.utils.gradient_norms import clip_grad_norm_, grad_norm
    from unisono.utils.reporting import Rate, Throughput, rank_logger
    from unisono.utils.seeding import Generators, seed

__all__ = [
    "EMA",
    "Generators",
    "Rate",
    "Throughput",
    "clip_grad_norm_",
    "grad_norm",
    "rank_logger",
    "seed",
]

__getattr__, __dir__ = load_on_use(
    __name__,
    {
        "unisono.utils.ema": "EMA",
        "unisono.utils.gradient_norms": "clip_grad_norm_ grad_norm",
        "unisono.utils.reporting": "Rate Throughput rank_logger",
        "unisono.utils.seeding": "Generators seed",
    },
)
