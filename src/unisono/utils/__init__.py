"""Helpers that training scripts share: seeds, gradient norms, logging, throughput, averages of parameters."""

from __future__ import annotations

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
