"""Collectives on flat tensors as a custom operator, for autograd and compilers; their adjoints compute gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from unisono.communicator import BY_HANDLE, Communicator, engine_of
from unisono.core.collective import COLLECTIVES
from unisono.core.flight_recorder import call_site
from unisono.errors import ClosedError, MismatchError

__all__ = ["ADJOINTS", "LINEAR", "REDUCTIONS", "apply", "apply_call", "gradient_of_linear", "gradient_of_reduction"]

_MESSAGES: WeakKeyDictionary[Communicator, Counter[tuple[str, int, int]]] = WeakKeyDictionary()
"""Number of differentiable messages in each direction, by peer and tag; sender and receiver have equal counts."""

_LINES: list[str] = []
"""Lines of the user's program that call differentiable collectives. A receipt contains an index into this list."""

# Every collective is declared to write to this tensor, so that a compiler neither drops nor reorders collectives.
with torch.inference_mode(False):
    _ORDER = torch.zeros(0, device="cpu")


def _call(
    x: torch.Tensor,
    order: torch.Tensor,
    receipt: torch.Tensor | None,
    name: str,
    handle: str,
    op: str,
    root: int,
    tag: int,
    sends: list[int],
    receives: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's result of a collective or message, and a receipt that identifies the call.

    Args:
        x: One-dimensional tensor; for a collective that scatters, the chunks for all ranks in rank order.
        order: Tensor that this operator claims to write to, so that compilers keep the order of calls.
        receipt: In a backward pass, the receipt of the forward call; ranks compare their receipts.
        name: Name of the collective, or "send" or "recv".
        handle: Handle of the communicator.
        op: Name of the reduction, if there is one.
        root: The root of a collective, or the peer of a message; -1 if there is neither.
        tag: Tag of a message.
        sends: Number of elements in each chunk of `x`.
        receives: Number of elements in each chunk of the result.

    Returns:
        A new one-dimensional tensor (zeros if the collective has no result for this rank), and the receipt, which
            contains the number and source line of this call.

    Raises:
        ClosedError: The communicator no longer exists.
        MismatchError: The ranks' backward passes have reached different collectives.
    """
    comm = BY_HANDLE.get(handle)
    if comm is None:
        raise ClosedError(f"the communicator of this {name} no longer exists; keep it until backward() has returned")
    origin = None
    if receipt is not None:
        number, line = receipt.tolist()
        origin = number, _LINES[line]
    if name in ("send", "recv"):
        y, number = _message(comm, x, origin, name, root, tag, receives)
    else:
        y = _collective(comm, x, origin, name, op, root, sends, receives)
        number = engine_of(comm).activity.calls
    line = call_site() or "an unknown line"
    if line not in _LINES:
        _LINES.append(line)
    return y, torch.tensor([number, _LINES.index(line)], device="cpu")


def _collective(
    comm: Communicator,
    x: torch.Tensor,
    origin: tuple[int, str] | None,
    name: str,
    op: str,
    root: int,
    sends: list[int],
    receives: list[int],
) -> torch.Tensor:
    what = COLLECTIVES[name]
    engine = engine_of(comm)
    rank = comm.rank
    y = x.clone(memory_format=torch.contiguous_format) if what.in_place else x.new_zeros(sum(receives))
    sides = _sides(what, x, y, sends, receives, rank, root)
    engine.block(what, *sides, op=op if what.reduces else None, root=root if what.root else None, origin=origin)
    return y if what.receives(rank, root) else y.zero_()


def _sides(
    what: Any, x: torch.Tensor, y: torch.Tensor, sends: list[int], receives: list[int], rank: int, root: int
) -> tuple[Any, Any]:
    """Return a collective's output and input in the form that the communicator's method takes."""
    if what.in_place:
        return y, None
    output: Any = y
    if what.gathers:
        output = y.split(receives) if what.receives(rank, root) else None
    if what.scatters:
        return output, x.split(sends) if what.contributes(rank, root) else None
    return output, x


def _message(
    comm: Communicator,
    x: torch.Tensor,
    origin: tuple[int, str] | None,
    name: str,
    peer: int,
    tag: int,
    receives: list[int],
) -> tuple[torch.Tensor, int]:
    """Send or receive a message. In a backward pass, the message's number is sent first, for the receiver to check."""
    move = getattr(comm, name)
    y = x.new_empty(sum(receives))
    if origin is not None:
        number = torch.tensor([origin[0]], device=x.device)
        move(number, peer, tag)
        if number.item() != origin[0]:
            error = MismatchError(
                f"rank {peer} sent the gradient of its differentiable message {number.item()}, but this rank expects "
                f"that of message {origin[0]}, at {origin[1]}. All ranks must go through their graphs in the same order"
            )
            raise engine_of(comm).failures.report(error, name)
    move(x if name == "send" else y, peer, tag)
    counted = _MESSAGES.setdefault(comm, Counter())
    counted[name, peer, tag] += 1
    return y, counted[name, peer, tag]


_opaque = torch.library.custom_op("unisono::collective", _call, mutates_args=("order",))


@_opaque.register_fake
def _shapes(
    x: torch.Tensor,
    order: torch.Tensor,
    receipt: torch.Tensor | None,
    name: str,
    handle: str,
    op: str,
    root: int,
    tag: int,
    sends: list[int],
    receives: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(sum(receives)), torch.empty(2, dtype=torch.int64, device="cpu")


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
"""Name of each collective's adjoint, which takes the element counts with `sends` and `receives` swapped."""

REDUCTIONS = ("sum", "avg", "product", "min", "max")
"""Reductions that have a gradient."""

LINEAR = ("sum", "avg")

# An input for ranks whose tensor requires no gradient. Every rank's result must require a gradient; otherwise, only
# some ranks would take part in the backward pass.
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
        x, name, sends, receives, op, root, tag: As for `_call`.
        comm: The communicator.
    """
    return apply_call(x, None, name, comm.handle, (comm.rank, comm.size), op, root, tag, sends, receives)


def apply_call(x: torch.Tensor, receipt: torch.Tensor | None, *call: Any) -> torch.Tensor:
    """Return the result of a collective; in the backward pass, the adjoint collective computes the gradient.

    `call` contains the arguments of `_call` from `name` on, with (rank, size) inserted after the handle.
    """
    anchor = None if x.requires_grad else _ANCHOR
    result: torch.Tensor = _CollectiveFunction.apply(x, anchor, receipt, *call)[0]  # type: ignore[no-untyped-call]
    return result


class _CollectiveFunction(torch.autograd.Function):
    """A collective whose backward pass is its differentiable adjoint, which allows derivatives of any order."""

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
        call = _opaque if torch.compiler.is_compiling() else _call
        result: tuple[torch.Tensor, torch.Tensor] = call(
            x, _ORDER, receipt, name, handle, op, root, tag, sends, receives
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, _, _, *ctx.call = inputs
        y, receipt = output
        ctx.mark_non_differentiable(receipt)
        ctx.save_for_backward(receipt, *(() if ctx.call[3] in LINEAR else (x, y)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
        receipt, *tensors = ctx.saved_tensors
        adjoint = gradient_of_reduction if tensors else gradient_of_linear
        return adjoint(grad, receipt, ctx.call, *tensors), *[None] * (2 + len(ctx.call))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        # Make the batch the innermost dimension, so that each rank's chunk remains contiguous.
        x, anchor, receipt, *call, sends, receives = inputs
        size = info.batch_size
        batched = x.movedim(in_dims[0], -1).reshape(-1)
        counts = [n * size for n in sends], [n * size for n in receives]
        y, receipt = _CollectiveFunction.apply(batched, anchor, receipt, *call, *counts)  # type: ignore[no-untyped-call]
        return (y.view(-1, size), receipt), (1, None)


def gradient_of_linear(grad: torch.Tensor, receipt: torch.Tensor, call: list[Any]) -> torch.Tensor:
    """Return the gradient of a collective that moves or adds data: the adjoint collective, applied to `grad`."""
    name, handle, place, op, root, tag, sends, receives = call
    if op == "avg" and name != "all_reduce":
        # Divide here, because the adjoint only moves data.
        grad = grad / place[1]
        op = "sum"
    return apply_call(grad, receipt, ADJOINTS[name], handle, place, op, root, tag, receives, sends)


def gradient_of_reduction(
    grad: torch.Tensor, receipt: torch.Tensor, call: list[Any], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of an all_reduce with product, min or max: this rank's weight times the sum of gradients."""
    _, handle, place, op, *_ = call
    rank, size = place
    n = x.numel()
    if op == "product":
        parts = apply_call(x, receipt, "all_gather", handle, place, "sum", -1, 0, [n], [n] * size).view(size, n)
        others = torch.cat([parts[:rank], parts[rank + 1 :]]).prod(0)
        return apply_call(grad, receipt, "all_reduce", handle, place, "sum", -1, 0, [n], [n]) * others.conj()
    chosen = (x == y).to(grad.dtype)
    both = torch.cat([grad, chosen])
    total, ties = apply_call(both, receipt, "all_reduce", handle, place, "sum", -1, 0, [2 * n], [2 * n]).split(n)
    shared: torch.Tensor = total * chosen / ties
    return shared
