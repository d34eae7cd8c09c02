"""Differentiable collectives. A collective's gradient is computed by its adjoint, which is also a collective."""

from unisono.autograd.collectives import (
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_single,
    all_to_all_v,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)

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
