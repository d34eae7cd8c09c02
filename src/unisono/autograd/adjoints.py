"""The adjoint of each collective, and the one function of autograd that applies them."""

from __future__ import annotations

from typing import Any

import torch

from unisono.autograd.operator import collective
from unisono.communicator import Communicator

__all__ = ["ADJOINTS", "LINEAR", "REDUCTIONS", "apply"]

ADJOINTS = {
    "all_gather": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "reduce",
    "gather": "scatter",
    "recv": "send",
    "reduce": "broadcast",
    "reduce_scatter": "all_gather",
    "scatter": "gather",
    "send": "recv",
}
"""Name of the collective that moves the gradients of another one back, with the numbers of elements exchanged."""

REDUCTIONS = ("sum", "avg", "product", "min", "max")
"""Reductions that have a gradient."""

LINEAR = ("sum", "avg")

# Every rank's result must have a history, or only some ranks would take part in the backward pass.
with torch.inference_mode(False):
    _ANCHOR = torch.zeros((), device="cpu", requires_grad=True)


def apply(
    x: torch.Tensor,
    comm: Communicator,
    name: str,
    sends: list[int],
    receives: list[int],
    op: str = "sum",
    root: int = -1,
    tag: int = 0,
) -> torch.Tensor:
    """Return this rank's result of a differentiable collective on a one-dimensional tensor.

    Args:
        x, name, sends, receives, op, root, tag: As for `collective` of the operator.
        comm: The communicator.
    """
    return _apply(x, None, name, comm._handle, (comm.rank, comm.size), op, root, tag, sends, receives)


def _apply(x: torch.Tensor, receipt: torch.Tensor | None, *call: Any) -> torch.Tensor:
    anchor = None if x.requires_grad else _ANCHOR
    result: torch.Tensor = _Collective.apply(x, anchor, receipt, *call)[0]  # type: ignore[no-untyped-call]
    return result


class _Collective(torch.autograd.Function):
    """A collective, whose backward is the differentiable adjoint: so it can be differentiated any number of times."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        anchor: torch.Tensor | None,
        receipt: torch.Tensor | None,
        name: str,
        handle: str,
        place: tuple[int, int],
        op: str,
        root: int,
        tag: int,
        sends: list[int],
        receives: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return collective(x, receipt, name, handle, op, root, tag, sends, receives)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, _, _, *ctx.call = inputs
        y, receipt = output
        ctx.mark_non_differentiable(receipt)
        ctx.save_for_backward(receipt, *(() if ctx.call[3] in LINEAR else (x, y)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
        receipt, *tensors = ctx.saved_tensors
        adjoint = _of_reduction if tensors else _of_linear
        return adjoint(grad, receipt, ctx.call, *tensors), *[None] * (2 + len(ctx.call))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        # The batch becomes the innermost dimension, so that the parts stay consecutive.
        x, anchor, receipt, *call, sends, receives = inputs
        size = info.batch_size
        batched = x.movedim(in_dims[0], -1).reshape(-1)
        counts = [n * size for n in sends], [n * size for n in receives]
        y, receipt = _Collective.apply(batched, anchor, receipt, *call, *counts)  # type: ignore[no-untyped-call]
        return (y.view(-1, size), receipt), (1, None)


def _of_linear(grad: torch.Tensor, receipt: torch.Tensor, call: list[Any]) -> torch.Tensor:
    name, handle, place, op, root, tag, sends, receives = call
    if op == "avg" and name != "all_reduce":
        # The adjoint only moves data.
        grad = grad / place[1]
        op = "sum"
    return _apply(grad, receipt, ADJOINTS[name], handle, place, op, root, tag, receives, sends)


def _of_reduction(
    grad: torch.Tensor, receipt: torch.Tensor, call: list[Any], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of an all_reduce by product, min or max: this rank's weight times the sum of gradients."""
    _, handle, place, op, *_ = call
    (rank, size), n = place, x.numel()
    if op == "product":
        parts = _apply(x, receipt, "all_gather", handle, place, "sum", -1, 0, [n], [n] * size).view(size, n)
        others = torch.cat([parts[:rank], parts[rank + 1 :]]).prod(0)
        return _apply(grad, receipt, "all_reduce", handle, place, "sum", -1, 0, [n], [n]) * others.conj()
    chosen = (x == y).to(grad.dtype)
    both = torch.cat([grad, chosen])
    total, ties = _apply(both, receipt, "all_reduce", handle, place, "sum", -1, 0, [2 * n], [2 * n]).split(n)
    shared: torch.Tensor = total * chosen / ties
    return shared
