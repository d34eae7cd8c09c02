"""Ranks with fewer steps than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from unisono.gradients.flatten import broadcast_all
from unisono.gradients.weights import AllRanksDone, Weights

__all__ = ["joined"]


@contextmanager
def joined(
    tensors: Sequence[torch.Tensor], weights: Weights, shadow: Callable[[], None], steps: list[int]
) -> Iterator[None]:
    """Context in which ranks may make different numbers of steps; a rank without data shadows the others' steps.

    The idea is that of torch's `Join` (Yu, "Distributed training with uneven inputs", 2021).

    Args:
        tensors: Set on all ranks, at the end, to those of a rank that finished last.
        weights: Notified that ranks may differ; its communicator at the end broadcasts the tensors.
        shadow: Takes part in one step of the other ranks; raises `AllRanksDone` if there was none.
        steps: Its last entry is the number of steps that this rank has made.
    """
    before = steps[-1]
    weights.joining = weights.uneven = True
    try:
        yield
        weights.here = False
        made = steps[-1] - before
        try:
            while True:
                shadow()
        except AllRanksDone:
            pass
        by_rank = weights.comm.all_gather_object(made)
        broadcast_all(tensors, weights.comm, by_rank.index(max(by_rank)))
    finally:
        weights.joining, weights.here = False, True
        weights.forget()
