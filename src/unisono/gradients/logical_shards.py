"""Gradients of a step by logical shard, summed in one balanced binary tree on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.communicator import Communicator
from unisono.core.tensors import HALVES
from unisono.gradients.weights import used_gradients
from unisono.utils.bucket_plan import MIB, Named, plan_buckets

__all__ = ["LogicalShards"]

_CAP_BYTES = 25 * MIB

_Node = tuple[int, int]
"""A subtree: its first shard, and the one after its last."""

_Gradients = list[torch.Tensor | None]


class LogicalShards:
    """Sums of the gradients of logical shards, which the ranks have in consecutive runs of equal length.

    Sums are formed as soon as both parts of a subtree are there, so a rank with s shards keeps at most log2(s) + 1
    gradients of each parameter. If the tree adds each rank's shards to one sum, ranks all-reduce these; else (three
    ranks with two shards each, say) every rank gathers the partial sums of all.

    Args:
        named: The parameters, with their names.
        comm: Communicator that reduces in the balanced tree over the ranks.
        count: Number of shards in all.
        total: Whether the result is the sum rather than the mean.

    Attributes:
        local: The shards of this rank.
    """

    def __init__(self, named: Named, comm: Communicator, count: int, *, total: bool) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1 or count % comm.size:
            raise ValueError(f"shards must be a positive multiple of the {comm.size} ranks, not {count!r}")
        each = count // comm.size
        self.local = range(comm.rank * each, (comm.rank + 1) * each)
        self._runs = [(rank * each, (rank + 1) * each) for rank in range(comm.size)]
        self._named = named
        self._parameters = [parameter for _, parameter in named]
        self._arrived = set[int]()
        self._comm = comm
        self._count = count
        self._total = total
        self._open: int | None = None
        self._done = set[int]()
        self._sums = dict[_Node, _Gradients]()
        self._before: _Gradients = []

    @contextmanager
    def shard(self, number: int) -> Iterator[None]:
        """Context of the backward passes of one shard; after the last one of this rank gradients are averaged."""
        if self._open is not None:
            raise RuntimeError(f"shard({number}) was called inside shard({self._open}); leave that first")
        if isinstance(number, bool) or number not in self.local:
            first = self.local[0]
            last = self.local[-1]
            raise ValueError(f"shard {number!r} is not one of this rank, which has shards {first} to {last}")
        if number in self._done:
            raise ValueError(f"shard {number} has a gradient in this step already; each shard has one context a step")
        if not self._done:
            self._before = [parameter.grad for parameter in self._parameters]
        self._clear()
        self._open = number
        self._arrived.clear()
        try:
            yield
            lost = [name for i, (name, p) in enumerate(self._named) if i in self._arrived and p.grad is None]
            if lost:
                raise RuntimeError(used_gradients(lost))
        except BaseException:
            self._clear()
            if not self._done:
                for parameter, before in zip(self._parameters, self._before, strict=True):
                    parameter.grad = before
            raise
        finally:
            self._open = None
        self._add(number, [parameter.grad for parameter in self._parameters])
        self._clear()
        if len(self._done) == len(self.local):
            self._finish()

    @property
    def unfinished(self) -> bool:
        """True after some, but not all, of this rank's shards of a step."""
        return bool(self._done)

    def arrive(self, index: int, _gradient: torch.Tensor) -> None:
        """Hook of every gradient: raise outside of a shard, where it would belong to none."""
        if self._open is None:
            raise RuntimeError(
                "backward() ran outside of a logical shard; with shards=, put each backward pass into "
                "`with averager.shard(number):`"
            )
        self._arrived.add(index)

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _add(self, number: int, gradients: _Gradients) -> None:
        """Add the gradient of a shard, and all sums that are complete with it."""
        if not self._total:
            # Sums of half precision may overflow; their means do not.
            gradients = [g / self._count if g is not None and g.dtype in HALVES else g for g in gradients]
        self._done.add(number)
        self._sums[number, number + 1] = gradients
        for low, high in self._path(number):
            middle = _middle(low, high)
            if (low, middle) not in self._sums or (middle, high) not in self._sums:
                return
            left = self._sums.pop((low, middle))
            right = self._sums.pop((middle, high))
            self._sums[low, high] = [_plus(*pair) for pair in zip(left, right, strict=True)]

    def _path(self, number: int) -> list[_Node]:
        """Return the subtrees that a shard is a part of, the smallest first."""
        low = 0
        high = self._count
        found = list[_Node]()
        while high - low > 1:
            found.append((low, high))
            middle = _middle(low, high)
            low, high = (low, middle) if number < middle else (middle, high)
        return found[::-1]

    @torch.no_grad()
    def _finish(self) -> None:
        """Average the gradients of all shards of all ranks, and begin another step. Collective."""
        covers = [_cover(0, self._count, *run) for run in self._runs]
        mine = [self._sums[node] for node in covers[self._comm.rank]]
        self._sums.clear()
        self._done.clear()
        used = torch.tensor([any(sums[i] is not None for sums in mine) for i in range(len(self._parameters))])
        self._comm.all_reduce(used)
        indices = [i for i, is_used in enumerate(used.tolist()) if is_used]
        for bucket in plan_buckets(self._parameters, indices, _CAP_BYTES):
            members = [self._parameters[i] for i in bucket]
            partial = [torch.cat([_flat(sums[i], self._parameters[i]) for i in bucket]) for sums in mine]
            result = self._reduced(covers, partial)
            if not self._total and result.dtype not in HALVES:
                result /= self._count
            for i, parameter, part in zip(bucket, members, result.split([p.numel() for p in members]), strict=True):
                gradient = torch.empty_like(parameter).copy_(part.view(parameter.shape))
                before = self._before[i]
                parameter.grad = gradient if before is None else before.add_(gradient)
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                parameter.grad = self._before[i]
        self._before = []

    def _reduced(self, covers: list[list[_Node]], partial: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all shards, of each rank's partial sums of its own."""
        if all(len(cover) == 1 for cover in covers):
            self._comm.all_reduce(partial[0])
            return partial[0]
        numel = partial[0].numel()
        gathered = [partial[0].new_empty(numel * len(cover)) for cover in covers]
        self._comm.all_gather(gathered, torch.cat(partial))
        known: dict[_Node, torch.Tensor] = {
            node: part
            for cover, parts in zip(covers, gathered, strict=True)
            for node, part in zip(cover, parts.split(numel), strict=True)
        }

        def total_of(low: int, high: int) -> torch.Tensor:
            if (low, high) in known:
                return known[low, high]
            middle = _middle(low, high)
            return total_of(low, middle) + total_of(middle, high)

        reduced: torch.Tensor = total_of(0, self._count)
        return reduced


def _middle(low: int, high: int) -> int:
    """Return where the second half begins; the first one is the longer."""
    return low + (high - low + 1) // 2


def _cover(low: int, high: int, start: int, stop: int) -> list[_Node]:
    """Return the largest subtrees of one that make up a run of shards."""
    if stop <= low or high <= start:
        return []
    if start <= low and high <= stop:
        return [(low, high)]
    middle = _middle(low, high)
    return _cover(low, middle, start, stop) + _cover(middle, high, start, stop)


def _plus(some: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if some is None or other is None:
        return other if some is None else some
    return some + other


def _flat(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return parameter.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
