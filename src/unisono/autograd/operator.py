"""One collective on flat tensors, as autograd and compilers see it: a function that they do not look into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from unisono.comm.shape_exchange import ShapeExchange
from unisono.communicator import BY_HANDLE, Communicator
from unisono.core.collective import COLLECTIVES
from unisono.core.flight_recorder import call_site
from unisono.errors import ClosedError, MismatchError

__all__ = ["check_floating", "collective", "exchange_shapes", "flat_list"]

_MESSAGES: WeakKeyDictionary[Communicator, Counter[tuple[str, int, int]]] = WeakKeyDictionary()
"""Number of differentiable messages in each direction, by peer and tag: equal at both ends."""

_LINES: list[str] = []
"""Lines of the user's program that make differentiable calls; a receipt has the index of one."""

# A compiler keeps the number and the order of calls that write to a common tensor.
with torch.inference_mode(False):
    _ORDER = torch.zeros(0, device="cpu")


def collective(
    x: torch.Tensor,
    receipt: torch.Tensor | None,
    name: str,
    handle: str,
    op: str,
    root: int,
    tag: int,
    sends: list[int],
    receives: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's result of one collective or message, and the call's receipt.

    Args:
        x: One-dimensional; where the collective scatters, the parts for all ranks in order.
        receipt: In a backward pass, the receipt of the call whose gradients are moved; ranks compare it.
        name: Name of a collective, "send" or "recv".
        handle: The communicator's.
        op: Name of the reduction, where there is one.
        root: The root, or the peer of a message; -1 if there is none.
        tag: Of a message.
        sends: Numbers of elements of the parts of `x`.
        receives: Numbers of elements of the parts of the result.

    Returns:
        A new one-dimensional tensor, with zeros where the collective has no result for this rank; and the number
        and the line of this call.

    Raises:
        ClosedError: The communicator no longer exists.
        MismatchError: Ranks' backward passes are at different calls.
    """
    if torch.compiler.is_compiling():
        found: tuple[torch.Tensor, torch.Tensor] = _opaque(
            x, _ORDER, receipt, name, handle, op, root, tag, sends, receives
        )
        return found
    return _call(x, _ORDER, receipt, name, handle, op, root, tag, sends, receives)


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
        number = comm._engine.activity.calls
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
    engine = comm._engine
    rank = comm.rank
    y = x.clone(memory_format=torch.contiguous_format) if what.in_place else x.new_zeros(sum(receives))
    sides = _sides(what, x, y, sends, receives, rank, root)
    engine.block(what, *sides, op=op if what.reduces else None, root=root if what.root else None, origin=origin)
    return y if what.receives(rank, root) else y.zero_()


def _sides(
    what: Any, x: torch.Tensor, y: torch.Tensor, sends: list[int], receives: list[int], rank: int, root: int
) -> tuple[Any, Any]:
    """Return the output and the input of a collective, as its method takes them."""
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
    """Send or receive; in a backward pass, the number of the message goes before it, for the receiver to compare."""
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
            raise comm._engine.report_failure(error, name)
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


def check_floating(tensor: torch.Tensor, name: str) -> None:
    """Raise `TypeError` or `ValueError` if the tensor can have no gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"un.autograd.{name} takes a torch.Tensor, not {type(tensor).__name__}")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"un.autograd.{name} takes floating and complex tensors; {tensor.dtype} has no gradients: use comm.{name}"
        )


def flat_list(
    tensors: Sequence[torch.Tensor], comm: Communicator, name: str, *, alike: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """Return one tensor a rank as one flat tensor, and their numbers of elements.

    With `alike`, they must have one shape.
    """
    if not isinstance(tensors, Sequence) or len(tensors) != comm.size:
        raise ValueError(f"un.autograd.{name} takes a list of {comm.size} tensors, one for each rank")
    for tensor in tensors:
        check_floating(tensor, name)
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise ValueError(f"the tensors of un.autograd.{name} must have one dtype and be on one device")
        if alike and tensor.shape != tensors[0].shape:
            raise ValueError(
                f"the tensors of un.autograd.{name} must have one shape, not {tuple(tensors[0].shape)} and "
                f"{tuple(tensor.shape)}"
            )
    return torch.cat([tensor.reshape(-1) for tensor in tensors]), [tensor.numel() for tensor in tensors]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_shapes(tensors: torch.Tensor | Sequence[torch.Tensor], comm: Communicator, name: str) -> list[torch.Size]:
    """Return the shapes of the tensors that this rank receives. Collective.

    Args:
        tensors: As for the method of `Communicator` of this name.
        comm: The communicator.
        name: all_gather_v or all_to_all_v.
    """
    engine = comm._engine
    engine.enter(name)
    exchange = ShapeExchange(COLLECTIVES[name], None, comm.rank, comm.size, engine.transport.devices)
    with torch.no_grad():
        exchange.give(tensors, engine.options.device)
        engine.block(exchange.header, exchange.table, exchange.mine)
        try:
            exchange.allocate()
        except MismatchError as error:
            raise engine.report_failure(error, name) from None
    return [tensor.shape for tensor in exchange.output]
