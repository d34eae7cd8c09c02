"""Differentiable collectives: each is the adjoint of another one."""

from unisono.autograd.exchanges import all_gather, all_gather_v, all_to_all, all_to_all_single, all_to_all_v
from unisono.autograd.reductions import all_reduce, reduce, reduce_scatter
from unisono.autograd.rooted import broadcast, gather, recv, scatter, send

__all__ = [
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_v",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
