"""Calls that programs make, each with what it returns: the same on every backend."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Group = Any
Case = Callable[[Group], list[torch.Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Other numbers on every rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return (
        torch.randint(-50, 50, shape, generator=generator).to(dtype).div(8 if dtype.is_floating_point else 1).to(dtype)
    )


def size() -> int:
    return dist.get_world_size()


# -- reductions ------------------------------------------------------------------------------------
for _name in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):

    def _reducing(group: Group, name: str = _name) -> list[torch.Tensor]:
        t = drawn(3, 5)
        dist.all_reduce(t, getattr(dist.ReduceOp, name), group=group)
        return [t]

    def _reducing_elsewhere(group: Group, name: str = _name) -> list[torch.Tensor]:
        op, ranks = getattr(dist.ReduceOp, name), size()
        rooted, part, row = drawn(5), torch.empty(3), torch.empty(3)
        dist.reduce(rooted, 1, op, group=group)
        dist.reduce_scatter(part, list(drawn(3 * ranks).chunk(ranks)), op, group=group)
        dist.reduce_scatter_tensor(row, drawn(3 * ranks), op, group=group)
        return [part, row, *([rooted] if dist.get_rank() == 1 else [])]

    CASES[f"all_reduce_{_name}"] = _reducing
    CASES[f"reduce_and_reduce_scatter_{_name}"] = _reducing_elsewhere

for _name in ("BAND", "BOR", "BXOR"):

    def _bitwise(group: Group, name: str = _name) -> list[torch.Tensor]:
        t = drawn(9, dtype=torch.int64)
        dist.all_reduce(t, getattr(dist.ReduceOp, name), group=group)
        return [t]

    CASES[f"all_reduce_{_name}"] = _bitwise


@case
def all_reduce_of_every_dtype(group: Group) -> list[torch.Tensor]:
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
    results = [drawn(7, dtype=kind) for kind in kinds]
    results.append(torch.view_as_complex(drawn(4, 2)))
    for t in results:
        dist.all_reduce(t, group=group)
    return results


@case
def all_reduce_later(group: Group) -> list[torch.Tensor]:
    tensors = [drawn(n, seed=n) for n in (1, 1000, 100_000)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    small = drawn(3)
    dist.all_reduce(small, group=group)
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return [*tensors, small]


@case
def all_reduce_by_future(group: Group) -> list[torch.Tensor]:
    future = dist.all_reduce(drawn(5), group=group, async_op=True).get_future()
    return [future.then(lambda f: f.value()[0] * 2).wait()]


@case
def all_reduce_of_a_history(group: Group) -> list[torch.Tensor]:
    loss = (drawn(4).requires_grad_() * 2).sum()
    dist.all_reduce(loss, group=group)
    return [loss.detach()]


@case
def all_reduce_in_inference_mode(group: Group) -> list[torch.Tensor]:
    with torch.inference_mode():
        now, later = drawn(4), drawn(4)
        dist.all_reduce(now, group=group)
        dist.all_reduce(later, group=group, async_op=True).wait()
        return [now.clone(), later.clone()]


@case
def all_reduce_of_sparse_tensors(group: Group) -> list[torch.Tensor]:
    places = torch.tensor([[dist.get_rank(), 5, 5], [1, 2, 2]])
    t = torch.sparse_coo_tensor(places, drawn(3, 2), (8, 4, 2))
    dist.all_reduce(t, group=group)
    return [t.to_dense()]


@case
def all_reduce_coalesced(group: Group) -> list[torch.Tensor]:
    tensors = [drawn(3), drawn(2, 2, seed=1)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


@case
def reduce(group: Group) -> list[torch.Tensor]:
    results = []
    for root in range(size()):
        t = drawn(6, seed=root)
        dist.reduce(t, root, group=group)
        results.append(t if dist.get_rank() == root else torch.zeros(1))
    return results


@case
def reduce_scatter(group: Group) -> list[torch.Tensor]:
    out = torch.empty(4)
    dist.reduce_scatter(out, [drawn(4, seed=r) for r in range(size())], group=group)
    return [out]


@case
def reduce_scatter_tensor(group: Group) -> list[torch.Tensor]:
    out = torch.empty(2, 3)
    dist.reduce_scatter_tensor(out, drawn(2 * size(), 3), group=group)
    return [out]


# -- movements -------------------------------------------------------------------------------------
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
    """Each collective at once, and then all the waits."""
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
    # Who sends is held up elsewhere until the message has been taken, and the other way round.
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


# -- several calls as one --------------------------------------------------------------------------
@case
def coalescing(group: Group) -> list[torch.Tensor]:
    summed = [drawn(3), drawn(4)]
    with dist._coalescing_manager(group=group):
        for t in summed:
            dist.all_reduce(t, group=group)
    gathered = [torch.empty(2 * size()), torch.empty(3 * size())]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for t, n in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(t, drawn(n), group=group)
    manager.wait()
    scattered = [torch.empty(2), torch.empty(3)]
    with dist._coalescing_manager(group=group):
        for t in scattered:
            dist.reduce_scatter_tensor(t, drawn(t.numel() * size()), group=group)
    return [*summed, *gathered, *scattered]
