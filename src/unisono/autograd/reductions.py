"""Differentiable collectives that reduce: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.autograd.adjoints import LINEAR, REDUCTIONS, apply
from unisono.autograd.operator import check_floating, flat_list
from unisono.collectives.arguments import check_rank, check_scale
from unisono.communicator import Communicator
from unisono.core.tensors import parse_op
from unisono.core.types import ReduceOp

__all__ = ["all_reduce", "reduce", "reduce_scatter"]


def all_reduce(
    tensor: torch.Tensor, comm: Communicator, op: str | ReduceOp = "sum", *, scale: float | None = None
) -> torch.Tensor:
    """Return the sum (or `op`) of all ranks' tensors. Collective.

    The gradient is the sum of all ranks' gradients of the result; with "avg" their mean, with "min" and "max" shared
    evenly by the elements that equal the result, with "product" times the product of the other ranks' elements.

    Args:
        tensor: Of a floating or complex dtype, with as many elements on every rank.
        comm: The communicator.
        op: sum, avg, product, min, max.
        scale: As for `Communicator.all_reduce`; the gradient is scaled, too.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: The dtype or `op` has no gradient, or cannot be scaled.
        MismatchError: Ranks make different calls, also in a backward pass.

    Cost: as `Communicator.all_reduce`, and the same in backward; twice the bytes there with "min" and "max", p times
    with "product".

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = un.autograd.all_reduce(x, comm)
        ...     (y**2).sum().backward()
        ...     return y.item(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(3.0, 12.0), (3.0, 12.0)]
    """
    check_floating(tensor, "all_reduce")
    if scale is not None:
        check_scale(scale, parse_op(op), tensor.dtype)
        # With the next collective, which is this one.
        comm.agree(scale, "scale")
        tensor = tensor * scale
    n = [tensor.numel()]
    return apply(tensor.reshape(-1), comm, "all_reduce", n, n, _check_op(op, "all_reduce", REDUCTIONS)).view(
        tensor.shape
    )


def reduce(tensor: torch.Tensor, comm: Communicator, dst: int, op: str | ReduceOp = "sum") -> torch.Tensor:
    """Return the sum of all ranks' tensors on rank `dst`, and zeros on the other ranks. Collective.

    The gradient is that of rank `dst`'s result, on every rank; the other ranks' own gradients are ignored.

    Args:
        tensor, comm: As for `all_reduce`.
        dst: The rank that gets the sum.
        op: sum, avg.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError, MismatchError: As `all_reduce`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = un.autograd.reduce(x, comm, dst=1)
        ...     (5 * y).sum().backward()
        ...     return y.item(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(0.0, 5.0), (3.0, 5.0)]
    """
    check_floating(tensor, "reduce")
    check_rank(dst, "dst", comm.size)
    n = [tensor.numel()]
    return apply(tensor.reshape(-1), comm, "reduce", n, n, _check_op(op, "reduce", LINEAR), dst).view(tensor.shape)


def reduce_scatter(tensors: Sequence[torch.Tensor], comm: Communicator, op: str | ReduceOp = "sum") -> torch.Tensor:
    """Return the sum of every rank's `tensors[r]` on rank r. Collective.

    The gradient of each `tensors[r]` is that of rank r's result.

    Args:
        tensors: One tensor a rank, of one floating or complex dtype. They may differ in shape, alike on all ranks.
        comm: The communicator.
        op: sum, avg.

    Returns:
        A new tensor of the shape of `tensors[comm.rank]`.

    Raises:
        ValueError, MismatchError: As `all_reduce`.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(2, 3, requires_grad=True)
        ...     y = un.autograd.reduce_scatter(x.unbind(), comm)
        ...     (y * (comm.rank + 1)).sum().backward()
        ...     return y.tolist(), x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")[0]
        ([2.0, 2.0, 2.0], [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    """
    flat, counts = flat_list(tensors, comm, "reduce_scatter")
    op = _check_op(op, "reduce_scatter", LINEAR)
    result = apply(flat, comm, "reduce_scatter", counts, [counts[comm.rank]], op)
    return result.view(tensors[comm.rank].shape)


def _check_op(op: str | ReduceOp, name: str, known: tuple[str, ...]) -> str:
    """Return the name of a reduction that has a gradient; `ValueError` for others."""
    found = parse_op(op).value
    if found in known:
        return found
    if found in REDUCTIONS:
        raise ValueError(f"un.autograd.{name} has no gradient for op={found!r}; use un.autograd.all_reduce, which has")
    raise ValueError(f"op={found!r} has no gradient; un.autograd.{name} takes {', '.join(known)}")
