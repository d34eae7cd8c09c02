"""The check that shards of tensors, which ranks save together, are whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.core.tensor_shard import TensorShard
from unisono.errors import MismatchError

__all__ = ["TensorShard", "check_ranges"]


def check_ranges(shards: Mapping[str, TensorShard], held: Sequence[Mapping[str, tuple[int, int]]], rank: int) -> None:
    """Raise `MismatchError` unless the ranks together have each element of each tensor once.

    Args:
        shards: The shards of this rank, by name; on all ranks of the same shapes.
        held: For each rank the elements that it has of a tensor, if any, as start and stop.
        rank: This rank.
    """
    for name, shard in shards.items():
        problem = _problem([(*ranges[name], owner) for owner, ranges in enumerate(held) if name in ranges], shard.shape)
        if problem:
            raise MismatchError(
                f"the shards of {name!r}, of shape {list(shard.shape)}, {problem}. Nothing was written",
                rank=rank,
                size=len(held),
                operation="save",
            )


def _problem(found: list[tuple[int, int, int]], shape: torch.Size) -> str | None:
    """Return the first overlap or gap of ranges, which are start, stop and rank."""
    position, owner = 0, -1
    for start, stop, other in sorted(found):
        if start < position:
            return f"overlap: elements {start} to {min(position, stop)} are on ranks {owner} and {other}"
        if start > position:
            break
        position, owner = stop, other
    if position == shape.numel():
        return None
    listed = ", ".join(f"rank {other} has {start} to {stop}" for start, stop, other in sorted(found)[:8])
    return f"lack elements from {position} on: {listed or 'no rank has any'}"
