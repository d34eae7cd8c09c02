"""Calls that move data without reducing it: collectives and messages."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch_case import Group, collection, drawn, size

__all__ = ["CASES"]

CASES, case = collection()


@case
def broadcast(group: Group) -> list[torch.Tensor]:
    results = [drawn(5, seed=root) for root in range(size())]
    for root, t in enumerate(results):
        dist.broadcast(t, root, group=group)
    dist.broadcast(empty := torch.empty(0), 0, group=group)
    return [*results, empty]


@case
def all_gather(group: Group) -> list[torch.Tensor]:
    parts = [torch.empty(2, 2) for _ in range(size())]
    dist.all_gather(parts, drawn(2, 2), group=group)
    return parts


@case
def all_gather_into_tensor(group: Group) -> list[torch.Tensor]:
    now, later = torch.empty(2 * size(), 3), torch.empty(3 * size())
    dist.all_gather_into_tensor(now, drawn(2, 3), group=group)
    dist.all_gather_into_tensor(later, drawn(3), group=group, async_op=True).wait()
    return [now, later]


@case
def all_gather_coalesced(group: Group) -> list[torch.Tensor]:
    outputs = [[torch.empty(2), torch.empty(3)] for _ in range(size())]
    dist.all_gather_coalesced(outputs, [drawn(2), drawn(3)], group=group)
    return [t for row in outputs for t in row]


@case
def gather(group: Group) -> list[torch.Tensor]:
    here = dist.get_rank() == size() - 1
    parts = [torch.empty(3) for _ in range(size())] if here else None
    dist.gather(drawn(3), parts, size() - 1, group=group)
    return parts or []


@case
def scatter(group: Group) -> list[torch.Tensor]:
    out, here = torch.empty(3), dist.get_rank() == 1
    dist.scatter(out, [drawn(3, seed=r) for r in range(size())] if here else None, 1, group=group)
    return [out]


@case
def all_to_all_single(group: Group) -> list[torch.Tensor]:
    even = torch.empty(2 * size(), 2)
    dist.all_to_all_single(even, drawn(2 * size(), 2), group=group)
    given = [dist.get_rank() + r + 1 for r in range(size())]
    uneven = torch.empty(sum(given))
    dist.all_to_all_single(uneven, drawn(sum(given)), given, given, group=group)
    return [even, uneven]


@case
def everything_later(group: Group) -> list[torch.Tensor]:
    """Start every collective, and then wait for all of them."""
    ranks, first = size(), dist.get_rank() == 0
    summed, told, rooted, parted, scattered = (
        drawn(4),
        drawn(4, seed=1),
        drawn(4, seed=2),
        torch.empty(4),
        torch.empty(4),
    )
    row, parts, exchanged = torch.empty(4 * ranks), [torch.empty(4) for _ in range(ranks)], torch.empty(2 * ranks)
    collected = [torch.empty(4) for _ in range(ranks)] if first else None
    works = [
        dist.all_reduce(summed, dist.ReduceOp.MAX, group=group, async_op=True),
        dist.broadcast(told, 1, group=group, async_op=True),
        dist.reduce(rooted, 0, group=group, async_op=True),
        dist.all_gather(parts, drawn(4), group=group, async_op=True),
        dist.all_gather_into_tensor(row, drawn(4), group=group, async_op=True),
        dist.reduce_scatter_tensor(parted, drawn(4 * ranks), group=group, async_op=True),
        dist.scatter(scattered, list(drawn(4 * ranks).chunk(ranks)) if first else None, 0, group=group, async_op=True),
        dist.gather(drawn(4), collected, 0, group=group, async_op=True),
        dist.all_to_all_single(exchanged, drawn(2 * ranks), group=group, async_op=True),
        dist.barrier(group=group, async_op=True),
    ]
    for work in works:
        work.wait(timedelta(seconds=20))
    return [summed, told, *([rooted] if first else []), *parts, row, parted, scattered, exchanged, *(collected or [])]


@case
def ranks_of_the_group(group: Group) -> list[torch.Tensor]:
    told, got = drawn(3), torch.zeros(3)
    dist.broadcast(told, group=group, group_src=size() - 1)
    if dist.get_rank() == 0:
        dist.send(drawn(3), group=group, group_dst=1)
    elif dist.get_rank() == 1:
        dist.recv(got, group=group, group_src=0)
    return [told, got]


# -- messages --------------------------------------------------------------------------------------
def neighbours() -> tuple[int, int]:
    return (dist.get_rank() + 1) % size(), (dist.get_rank() - 1) % size()


@case
def send_and_recv(group: Group) -> list[torch.Tensor]:
    after, before = neighbours()
    got = torch.empty(4)
    if dist.get_rank() % 2 == 0:
        dist.send(drawn(4), after, group=group)
        source = dist.recv(got, before, group=group)
    else:
        mine = drawn(4)
        source = dist.recv(got, before, group=group)
        dist.send(mine, after, group=group)
    return [got, torch.tensor(source)]


@case
def from_any_rank(group: Group) -> list[torch.Tensor]:
    """A blocking receive of each other's message, then one with a tag that is waited for later."""
    if dist.get_rank() > 0:
        dist.send(drawn(4), 0, group=group)
        dist.send(drawn(3, seed=1), 0, group=group, tag=1)
        # Rank 0 takes messages of any rank: one of a later case must not come before another rank's of this one.
        dist.barrier(group=group)
        return []
    got, sources = torch.empty(size() - 1, 4), []
    for _ in range(size() - 1):
        t = torch.empty(4)
        sources.append(dist.recv(t, group=group))
        got[sources[-1] - 1] = t
    later = [torch.empty(3) for _ in range(size() - 1)]
    works = [dist.irecv(t, group=group, tag=1) for t in later]
    for work in works:
        work.wait()
    dist.barrier(group=group)
    in_order = sorted(range(size() - 1), key=lambda n: works[n].source_rank())
    return [got, torch.tensor(sorted(sources)), *(later[n] for n in in_order)]


@case
def messages_by_tag(group: Group) -> list[torch.Tensor]:
    after, before = neighbours()
    works = [dist.isend(drawn(3, seed=tag), after, group=group, tag=tag) for tag in (1, 2)]
    got = [torch.empty(3), torch.empty(3)]
    works += [dist.irecv(t, before, group=group, tag=tag) for t, tag in zip(got, (2, 1), strict=True)]
    for work in works:
        work.wait()
    return got


@case
def long_messages_move_while_nobody_waits(group: Group) -> list[torch.Tensor]:
    after, before = neighbours()
    got = torch.empty(1_000_000)
    works = [dist.isend(drawn(1_000_000), after, group=group), dist.irecv(got, before, group=group)]
    # The sender does not return before the message is received, and vice versa.
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        works.pop().wait()
    dist.barrier(group=group)
    for work in works:
        work.wait()
    return [got]


@case
def batch_isend_irecv(group: Group) -> list[torch.Tensor]:
    after, before = neighbours()
    got = torch.empty(300_000)
    ops = [dist.P2POp(dist.isend, drawn(300_000), after, group), dist.P2POp(dist.irecv, got, before, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [got]
