"""Reductions, as programs call them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import _coalescing_manager
from torch_case import Group, collection, drawn, size

__all__ = ["CASES"]

CASES, case = collection()


for _name in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):

    def _reducing(group: Group, name: str = _name) -> list[torch.Tensor]:
        t = drawn(3, 5)
        dist.all_reduce(t, getattr(dist.ReduceOp, name), group=group)
        return [t]

    def _reducing_elsewhere(group: Group, name: str = _name) -> list[torch.Tensor]:
        op, ranks = getattr(dist.ReduceOp, name), size()
        rooted, part, row = drawn(5), torch.empty(3), torch.empty(3)
        dist.reduce(rooted, 1, op, group=group)
        # Gloo of torch 2.8 adds in reduce_scatter, whatever the operation.
        op = op if torch.__version__ >= "2.9" else dist.ReduceOp.SUM
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


# -- several calls as one --------------------------------------------------------------------------
@case
def coalescing(group: Group) -> list[torch.Tensor]:
    summed = [drawn(3), drawn(4)]
    with _coalescing_manager(group=group):
        for t in summed:
            dist.all_reduce(t, group=group)
    gathered = [torch.empty(2 * size()), torch.empty(3 * size())]
    with _coalescing_manager(group=group, async_ops=True) as manager:
        for t, n in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(t, drawn(n), group=group)
    manager.wait()
    scattered = [torch.empty(2), torch.empty(3)]
    with _coalescing_manager(group=group):
        for t in scattered:
            dist.reduce_scatter_tensor(t, drawn(t.numel() * size()), group=group)
    return [*summed, *gathered, *scattered]
