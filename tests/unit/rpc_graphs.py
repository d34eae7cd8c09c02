"""Computations that cross ranks, and the same ones on one."""

from __future__ import annotations

from typing import Any

import torch

import unisono as un
from unisono.rpc import autograd

__all__ = [
    "OPS",
    "OWN",
    "N",
    "Step",
    "apply",
    "begin",
    "call",
    "chosen",
    "expected",
    "gradients",
    "locally",
    "loss_of",
    "own_parameters",
    "parameters",
    "start_values",
    "walk",
]


rpc = un.rpc
N = 5
OWN = 2
"""Parameters of each rank."""

# A step: the ranks it goes along, what each does, which earlier values go in, how the call is made.
Step = tuple[tuple[int, ...], str, tuple[int, ...], str]
PARAMETERS: dict[int, list[torch.Tensor]] = {}


def parameters(rank: int) -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(rank)
    return [torch.randn(N, dtype=torch.float64, generator=seeded).requires_grad_() for _ in range(OWN)]


def begin(rank: int) -> None:
    """Give a rank its parameters, where what others call finds them, by whatever way the caller has come."""
    PARAMETERS[rank] = parameters(rank)


def apply(op: str, own: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    first = inputs[0]
    if op == "shared":
        # One leaf, used twice, and with every input.
        return [value * own[0] + torch.sin(own[0]) for value in inputs]
    if op == "mix":
        return [sum(inputs[1:], start=first) * own[1] + first, *inputs[1:]]
    if op == "drop":
        # Others came for nothing.
        return [torch.tanh(first)]
    if op == "swap":
        return [*inputs[1:], first.flip(0)]
    if op == "in place":
        return [(value * 1.5).add_(own[0]) if i else value.clone().mul_(own[1]) for i, value in enumerate(inputs)]
    return [value.detach() if i % 2 else value * 2 for i, value in enumerate(inputs)]


OPS = ["shared", "mix", "drop", "swap", "in place", "detach"]


def own_parameters() -> list[torch.Tensor]:
    return PARAMETERS[rpc.get_worker_info().id]


@rpc.expose
def walk(path: tuple[int, ...], op: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Do something, let the next one do the same, and do it again to what comes back."""
    values = apply(op, own_parameters(), inputs)
    if path:
        values = rpc.rpc_sync(path[0], walk, (path[1:], op, values))
        values = apply(op, own_parameters(), values)
    return values


@rpc.expose
def gradients(context: int) -> list[torch.Tensor | None]:
    found = autograd.get_gradients(context)
    return [found.get(parameter) for parameter in own_parameters()]


def locally(path: tuple[int, ...], op: str, inputs: list[torch.Tensor], here: int, all_own: Any) -> Any:
    values = apply(op, all_own[here], inputs)
    if path:
        values = apply(op, all_own[here], locally(path[1:], op, values, path[0], all_own))
    return values


def call(step: Step, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    path, op, _, how = step
    arguments = path[0], walk, (path[1:], op, inputs)
    if how == "sync":
        return list(rpc.rpc_sync(*arguments))
    if how == "async":
        return list(rpc.rpc_async(*arguments).wait())
    return list(rpc.remote(*arguments).to_here())


def start_values() -> list[torch.Tensor]:
    return [torch.linspace(0.1, k + 1.0, N, dtype=torch.float64).requires_grad_() for k in range(2)]


def chosen(values: list[torch.Tensor], step: Step) -> list[torch.Tensor]:
    return [values[i % len(values)] for i in step[2]]


def loss_of(values: list[torch.Tensor]) -> torch.Tensor:
    # Of the last few; what was computed before may be for nothing.
    return torch.stack([value.sum() for value in values[-3:]]).sum() + values[0].sum()


def expected(steps: list[Step], size: int) -> list[list[torch.Tensor | None]]:
    all_own = {rank: parameters(rank) for rank in range(size)}
    values = start_values()
    leaves = [*values, *(p for rank in range(size) for p in all_own[rank])]
    for step in steps:
        values = values + locally(step[0][1:], step[1], chosen(values, step), step[0][0], all_own)
    found = list(torch.autograd.grad(loss_of(values), leaves, allow_unused=True))
    return [found[:2], *(found[2 + OWN * rank : 2 + OWN * (rank + 1)] for rank in range(size))]


@rpc.expose
def times(value: torch.Tensor) -> torch.Tensor:
    """The product with the first of the parameters here."""
    return value * own_parameters()[0]
