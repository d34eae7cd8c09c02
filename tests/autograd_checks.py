"""Calls on tensors that autograd knows, which differ in nothing from torch's own functions that write to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import unisono as un
from unisono.core.types import Recv, Send
from unisono.testing.pools import RankPool

__all__ = ["check_views", "check_writes"]

_ROOTED = ("broadcast", "gather", "reduce")
_MESSAGES = ("recv", "irecv", "batch_isend_irecv")
_TIMES = 4
"""Calls on the same tensors: the first ones take other paths than those after them."""


def _calls(comm: un.Communicator, t: torch.Tensor, s: torch.Tensor) -> dict[str, Callable[..., Any]]:
    """Calls of two ranks that write to `t` (of those with a root, on rank 1 only), and read `s`."""
    other, root, both = torch.zeros_like(t), comm.rank == 1, torch.cat([s, s])
    return {
        "all_gather": lambda **how: comm.all_gather([t, other], s, **how),
        "all_gather_single": lambda **how: comm.all_gather_single(t, s[:2], **how),
        "all_reduce": lambda **how: comm.all_reduce(t, **how),
        "all_to_all": lambda **how: comm.all_to_all([t, other], [s, both[4:]], **how),
        "all_to_all_single": lambda **how: comm.all_to_all_single(t, s, **how),
        "broadcast": lambda **how: comm.broadcast(t, 0, **how),
        "gather": lambda **how: comm.gather(s, [t, other] if root else None, 1, **how),
        "reduce": lambda **how: comm.reduce(t, 1, **how),
        "reduce_scatter": lambda **how: comm.reduce_scatter(t, [s, both[4:]], **how),
        "reduce_scatter_single": lambda **how: comm.reduce_scatter_single(t, both, **how),
        "scatter": lambda **how: comm.scatter(t, [s, both[4:]] if root else None, 1, **how),
        "recv": lambda: comm.recv(t, 0) if root else comm.send(s, 1),
        "irecv": lambda: comm.irecv(t, 0) if root else comm.isend(s, 1),
        "batch_isend_irecv": lambda: comm.batch_isend_irecv([Recv(t, 0) if root else Send(s, 1)])[0],
        "sendrecv": lambda: comm.sendrecv(s, 1 - comm.rank, t, 1 - comm.rank),
    }


def _heard(comm: un.Communicator) -> dict[tuple[str, str, bool], list[bool]]:
    """Return for each call, communicator and `async_op` whether the backward passes were refused."""
    found = {}
    for kind, one in (("checked", comm), ("unchecked", comm.dup(check="off"))):
        for name in _calls(comm, torch.ones(4), torch.ones(4)):
            for background in (False,) if name in (*_MESSAGES, "sendrecv") else (False, True):
                t, s = torch.ones(4), torch.ones(4)
                call = _calls(one, t, s)[name]
                found[name, kind, background] = [_refused(t, call, background) for _ in range(_TIMES)]
    return found


def _refused(t: torch.Tensor, call: Callable[..., Any], background: bool) -> bool:
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * t).sum()
    work = call(async_op=True) if background else call()
    if isinstance(work, un.Work):
        work.wait()
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def _tried(comm: un.Communicator) -> dict[str, list[str]]:
    """Outcomes of each call on a view of a parameter made under no_grad: of two calls, and of one under no_grad."""
    found = {}
    for name in _calls(comm, torch.ones(4), torch.ones(4)).keys() - {"gather", *_MESSAGES}:
        with torch.no_grad():
            view = torch.nn.Parameter(torch.ones(4)).view(-1)
        found[name] = [_outcome(comm, view, name) for _ in range(2)]
        with torch.no_grad():
            found[name].append(_outcome(comm, view, name))
    return found


def _outcome(comm: un.Communicator, view: torch.Tensor, name: str) -> str:
    try:
        work = _calls(comm, view, torch.ones(4))[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done" if work is None else "a work"


def check_views(ranks: RankPool) -> None:
    """Fail unless each call refuses such a view on all ranks, or on none."""
    for found in ranks.run(_tried, size=2):
        for name, (first, second, without) in found.items():
            assert first.startswith("ValueError: "), (name, first)
            assert "has a gradient history" in first, (name, first)
            assert (second, without) == (first, "done"), name


def check_writes(ranks: RankPool) -> None:
    """Fail unless a backward pass is refused exactly where a call has written to a tensor that it needs."""
    for rank, found in enumerate(ranks.run(_heard, size=2)):
        for (name, *how), heard in found.items():
            assert heard == [rank == 1 or name not in (*_ROOTED, *_MESSAGES)] * _TIMES, (name, how, rank)
