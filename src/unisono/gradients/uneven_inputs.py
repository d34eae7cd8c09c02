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
    """Inside, ranks may make different numbers of steps; who is through makes the others' with nothing of its own.

    The idea is that of torch's `Join` (Yu, "Distributed training with uneven inputs", 2021).

    Args:
        tensors: What all ranks have of one that was last, at the end.
        weights: Told that ranks may differ; its communicator, whichever it is by then, gives them that.
        shadow: Takes part in one step of the others'; raises `AllRanksDone` if there was none.
        steps: Its last entry is how many steps this rank has made.
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
