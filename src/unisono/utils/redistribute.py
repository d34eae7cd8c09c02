"""Redistribution of shards: each rank receives the elements that it needs from the ranks that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.communicator import Communicator
from unisono.core.tensor_shard import TensorShard

__all__ = ["redistribute"]

_Range = tuple[int, int]
# Index of the first element, index after the last element, the rank that has the elements, and the index of its shard.
_Source = tuple[int, int, int, int]


def redistribute(
    held: Mapping[Any, Sequence[TensorShard]],
    wanted: Mapping[Any, tuple[int, int, torch.Size, torch.dtype]],
    comm: Communicator,
) -> dict[Any, TensorShard]:
    """Return a new shard for each wanted range, with elements from the ranks that have them. Collective.

    If several ranks have an element, the receiver uses its own copy if possible, otherwise the lowest rank's copy.

    Args:
        held: This rank's shards of each tensor. A tensor must have the same key on all ranks.
        wanted: For each tensor that this rank needs a part of: the part's start and stop in the flattened tensor, and
            the tensor's shape and dtype.
        comm: Communicator of the ranks.

    Raises:
        ValueError: Some elements are not on any rank. Raised on every rank, before any data is sent.

    Cost: one exchange of the ranges, and one all_to_all of the elements. A rank sends its elements at most once to each
    rank that needs them, and needs memory for the elements sent and received.

    Example:
        >>> from unisono.utils.redistribute import redistribute
        >>> def program(comm):
        ...     whole = torch.arange(6.0) + 10
        ...     cut = slice(3 * comm.rank, 3 * comm.rank + 3)
        ...     held = {"w": [un.checkpoint.TensorShard(whole[cut], cut.start, whole.shape)]}
        ...     wanted = {"w": (0, 6, whole.shape, whole.dtype)} if comm.rank == 1 else {}
        ...     return [shard.local.tolist() for shard in redistribute(held, wanted, comm).values()]
        >>> un.launch(program, 2, "thread")
        [[], [[10.0, 11.0, 12.0, 13.0, 14.0, 15.0]]]
    """
    mine = {key: [(s.start, s.stop) for s in shards] for key, shards in held.items()}
    needs: list[tuple[dict[Any, list[_Range]], dict[Any, _Range]]] = comm.all_gather_object(
        (mine, {key: (start, stop) for key, (start, stop, _, _) in wanted.items()})
    )
    sources: dict[Any, list[_Source]] = {}
    for rank, (ranges, _) in enumerate(needs):
        for key, found in ranges.items():
            sources.setdefault(key, []).extend((start, stop, rank, n) for n, (start, stop) in enumerate(found))
    plans = [
        {key: _plan(key, sources.get(key, []), *ranges, rank) for key, ranges in want.items()}
        for rank, (_, want) in enumerate(needs)
    ]
    nothing = torch.empty(0, dtype=torch.uint8, device=comm.device)
    sent = []
    for plan in plans:
        slices = [
            held[key][n].local[start - held[key][n].start : stop - held[key][n].start]
            for key, steps in plan.items()
            for start, stop, rank, n in steps
            if rank == comm.rank
        ]
        sent.append(torch.cat([nothing, *(piece.contiguous().view(torch.uint8).to(comm.device) for piece in slices)]))
    arrived = comm.all_to_all_v(sent)
    shards = {}
    places = [0] * comm.size
    for key, (first, last, shape, dtype) in wanted.items():
        local = torch.empty(last - first, dtype=dtype, device=comm.device)
        for start, stop, rank, _ in plans[comm.rank][key]:
            target = local[start - first : stop - first].view(torch.uint8)
            target.copy_(arrived[rank][places[rank] : places[rank] + len(target)])
            places[rank] += len(target)
        shards[key] = TensorShard(local, first, shape)
    return shards


def _plan(key: Any, sources: Sequence[_Source], start: int, stop: int, receiver: int) -> list[_Source]:
    """Return the sources of a range's elements, in order."""
    plan = []
    while start < stop:
        found = [source for source in sources if source[0] <= start < source[1]]
        if not found:
            raise ValueError(f"no rank has element {start} of {key!r}")
        _, end, rank, number = min(found, key=lambda source: (source[2] != receiver, source[2]))
        plan.append((start, min(end, stop), rank, number))
        start = min(end, stop)
    return plan
