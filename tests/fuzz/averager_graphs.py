"""A model made of the nodes of a case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from averager_programs import ROWS, WIDTH, Case, Place
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Graph", "Watcher", "trap"]


class Watcher(Protocol):
    """An observer of a forward and a backward pass."""

    def watch(self, index: int, value: torch.Tensor) -> None: ...

    def arrive(self, place: Place) -> None: ...


class _Trap(torch.autograd.Function):
    """The identity, whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradients[0], None


def trap(given: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """The same values; call a function in the backward pass."""
    out: torch.Tensor = _Trap.apply(given, call)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return out


class Graph(nn.Module):
    """A model of the nodes of a case, which a rank computes in an order of its own."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        kinds = {node.kind for node in case.nodes}
        self.nodes = case.nodes
        self.order = case.order(rank)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bool(which % 2)) for which in range(3))
        self.scales = nn.ParameterList([torch.empty(WIDTH), torch.empty(())])
        if "wide" in kinds:
            self.up, self.down = nn.Linear(WIDTH, case.wide, bias=False), nn.Linear(case.wide, WIDTH, bias=False)
        if kinds & {"embedding", "tied"}:
            self.table = nn.Embedding(ROWS, WIDTH, sparse="embedding" in kinds)
        if "buffer" in kinds:
            # Two samples alone would make zeros and ones of all values.
            self.norm = nn.BatchNorm1d(WIDTH, eps=1.0, affine=False)
            for name in ("assigned", "added", "written"):
                self.register_buffer(name, torch.ones(WIDTH))
        self.extra = nn.Sequential()
        # Ranks that are threads share torch's own generator.
        numbers = torch.Generator().manual_seed(case.seed)
        self.to(getattr(torch, case.dtype))
        if "complex" in kinds:
            self.turn = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=getattr(torch, case.dtype).to_complex()))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype) * 0.6)

    def forward(
        self, x: torch.Tensor, rows: torch.Tensor, skips: frozenset[int], watcher: Watcher | None = None
    ) -> torch.Tensor:
        values = {0: x}
        for i in self.order:
            node = self.nodes[i]
            given = values[node.reads[0]]
            for read in node.reads[1:]:
                given = given + values[read]
            if i not in skips:
                run = partial(self._run, i, rows=rows, watcher=watcher)
                if node.checkpoint:
                    reentrant = node.checkpoint == "reentrant"
                    given = checkpoint(run, given, use_reentrant=reentrant, preserve_rng_state=False)
                else:
                    given = run(given)
            if watcher is not None and i + 1 < len(self.nodes):
                watcher.watch(i + 1, given)
            values[i + 1] = given
        result = values[len(self.nodes)]
        # An averager cannot watch a result that is the batch itself.
        out: torch.Tensor = self.extra(x * 1.0 if result is x else result)
        return out

    def _run(self, i: int, given: torch.Tensor, rows: torch.Tensor, watcher: Watcher | None) -> torch.Tensor:
        node = self.nodes[i]
        if node.kind == "linear":
            given = torch.tanh(self.layers[node.which](given))
        elif node.kind == "wide":
            given = self.down(torch.tanh(self.up(given)))
        elif node.kind == "scale":
            given = given * self.scales[node.which % 2]
        elif node.kind == "complex":
            given = torch.view_as_real(given.to(self.turn.dtype) @ self.turn).sum(-1).to(given.dtype)
        elif node.kind == "embedding":
            given = given + self.table(rows)
        elif node.kind == "tied":
            given = given * self.table.weight.mean(0)
        elif node.kind == "function" and watcher is not None:
            given = trap(given, partial(watcher.arrive, Place("function", i)))
        elif node.kind == "buffer":
            given = self._buffered(given, node.which)
        return torch.tanh(given) if node.kind == "tanh" else given

    def _buffered(self, given: torch.Tensor, which: int) -> torch.Tensor:
        """Change a buffer, and use it."""
        mean = given.detach().mean(0).tanh()
        if which == 0:
            out: torch.Tensor = self.norm(given)
            return out
        if which == 1:
            self.assigned = 0.5 * self.assigned + mean
            return given * self.assigned
        if which == 2:
            self.added.mul_(0.5).add_(mean)
            return given + self.added
        self.written.mul_(0.5).add_(mean)
        return given * self.written
