"""Checks of the tensors of differentiable collectives, and exchange of their shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.comm.shape_exchange import ShapeExchange
from unisono.communicator import Communicator
from unisono.core.collective import COLLECTIVES
from unisono.errors import MismatchError

__all__ = ["check_floating", "exchange_shapes", "flat_list"]


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
