"""Calls of all kinds with tensors of their own, made again and again with other values."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import unisono as un
from unisono.transports._shm_calls import FORMS

__all__ = ["RANKS", "Kind", "Made", "kinds"]

RANKS = 3

Kind = tuple[str, int, torch.dtype, str, int]
"""A call: its name, elements, dtype, operation and root."""
kinds = st.tuples(
    st.sampled_from(["all_reduce", *sorted(FORMS)]),
    st.sampled_from([1, 3, 1025, 17_000, 90_001, 300_001]),
    st.sampled_from([torch.float32, torch.float64, torch.int32]),
    st.sampled_from(["sum", "sum", "avg", "max"]),
    st.integers(0, RANKS - 1),
).filter(lambda kind: kind[3] != "avg" or kind[2].is_floating_point)


class Made:
    """A call with tensors of its own, made again and again with other values."""

    def __init__(self, comm: un.Communicator, kind: Kind) -> None:
        self.comm, (self.name, self.count, self.dtype, self.op, root) = comm, kind
        self.root, size = root % comm.size, comm.size
        self.one, self.other = torch.zeros(self.count, dtype=self.dtype), torch.zeros(self.count, dtype=self.dtype)
        self.whole = [torch.zeros(self.count * size, dtype=self.dtype) for _ in range(2)]
        self.rows, self.more = ([torch.zeros(self.count, dtype=self.dtype) for _ in range(size)] for _ in range(2))

    def value(self, rank: int, place: int = 0) -> torch.Tensor:
        return torch.arange(self.count).add_(self.number + 7 * rank + 3 * place).remainder_(97).to(self.dtype)

    def reduced(self, place: int = 0) -> torch.Tensor:
        values = torch.stack([self.value(rank, place) for rank in range(self.comm.size)])
        if self.op == "max":
            return values.amax(0)
        total = values.sum(0, dtype=self.dtype)
        return total / self.comm.size if self.op == "avg" else total

    def make(self, number: int, how: dict[str, Any]) -> bool:
        """Whether all that is written is right, and nothing else has changed."""
        self.number, comm, here, size = number, self.comm, self.comm.rank, self.comm.size
        rooted, ranks = here == self.root, range(size)
        self.one.copy_(self.value(here))
        self.other.zero_()
        self.whole[0].zero_()
        self.whole[1].copy_(torch.cat([self.value(here, place) for place in ranks]))
        for rank in ranks:
            self.rows[rank].zero_()
            self.more[rank].copy_(self.value(here, rank))
        work = {
            "all_reduce": lambda: comm.all_reduce(self.one, self.op, **how),
            "all_gather": lambda: comm.all_gather(self.rows, self.one, **how),
            "all_gather_single": lambda: comm.all_gather_single(self.whole[0], self.one, **how),
            "all_to_all": lambda: comm.all_to_all(self.rows, self.more, **how),
            "all_to_all_single": lambda: comm.all_to_all_single(*self.whole, **how),
            "broadcast": lambda: comm.broadcast(self.one, self.root, **how),
            "gather": lambda: comm.gather(self.one, self.rows if rooted else None, self.root, **how),
            "reduce": lambda: comm.reduce(self.one, self.root, self.op, **how),
            "reduce_scatter": lambda: comm.reduce_scatter(self.other, self.more, self.op, **how),
            "reduce_scatter_single": lambda: comm.reduce_scatter_single(self.other, self.whole[1], self.op, **how),
            "scatter": lambda: comm.scatter(self.other, self.more if rooted else None, self.root, **how),
        }[self.name]()
        if work is not None:
            work.wait()
        all_ranks = torch.cat([self.value(rank) for rank in ranks])
        for_me = torch.cat([self.value(rank, here) for rank in ranks])
        one = {
            "all_reduce": self.reduced,
            "broadcast": lambda: self.value(self.root),
            "reduce": lambda: self.reduced() if rooted else self.value(here),
        }.get(self.name, lambda: self.value(here))()
        other = {
            "reduce_scatter": lambda: self.reduced(here),
            "reduce_scatter_single": lambda: self.reduced(here),
            "scatter": lambda: self.value(self.root, here),
        }.get(self.name, lambda: torch.zeros_like(self.other))()
        rows = {"all_gather": all_ranks, "all_to_all": for_me, "gather": all_ranks * rooted}
        whole = {"all_gather_single": all_ranks, "all_to_all_single": for_me}
        nothing = torch.zeros_like(self.whole[0])
        return (
            torch.allclose(self.one, one)
            and torch.allclose(self.other, other)
            and torch.equal(torch.cat(self.rows), rows.get(self.name, nothing))
            and torch.equal(self.whole[0], whole.get(self.name, nothing))
            and torch.equal(torch.cat(self.more), self.whole[1])
        )
