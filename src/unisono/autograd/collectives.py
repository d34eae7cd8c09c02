"""Differentiable collectives and point-to-point messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from unisono.autograd.operator import LINEAR, REDUCTIONS, apply
from unisono.collectives.arguments import check_rank, check_scale
from unisono.comm.shape_exchange import exchange_shapes
from unisono.communicator import Communicator, engine_of
from unisono.core.collective import COLLECTIVES
from unisono.core.tensors import parse_op
from unisono.core.types import ReduceOp

__all__ = [
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_v",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def all_gather(tensor: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all ranks, in rank order. Collective.

    The gradient of rank r's tensor is the gradient of entry r of the result, summed over all ranks. `torch.cat` joins
    the returned tensors along any dimension.

    Args:
        tensor: Tensor of a floating-point or complex dtype, with the same shape on all ranks.
        comm: The communicator.

    Returns:
        New tensors, one for each rank.

    Raises:
        ValueError: The dtype is neither floating-point nor complex.
        MismatchError: Ranks call different collectives, in the forward or the backward pass.

    Cost: one `Communicator.all_gather`, and one `reduce_scatter` in the backward pass.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = torch.cat(un.autograd.all_gather(x, comm))
        ...     y.prod().backward()
        ...     return y.tolist(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([1.0, 2.0], 4.0), ([1.0, 2.0], 2.0)]
    """
    _check_floating(tensor, "all_gather")
    n = tensor.numel()
    size = comm.size
    return apply(tensor.reshape(-1), comm, "all_gather", [n], [n] * size).view(size, *tensor.shape).unbind()


def all_gather_v(tensor: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all ranks, whose first dimensions may differ. Otherwise like `all_gather`.

    Ranks exchange the shapes first, which breaks a `torch.compile` graph.

    Args:
        tensor: Tensor of a floating-point or complex dtype, whose first dimension may differ between ranks.
        comm: The communicator.

    Returns:
        New tensors, one for each rank.

    Raises:
        MismatchError: Ranks' tensors differ in dtype, or in shape beyond the first dimension.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(comm.rank + 1, requires_grad=True)
        ...     y = torch.cat(un.autograd.all_gather_v(x, comm))
        ...     (y * torch.arange(3)).sum().backward()
        ...     return x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [[0.0], [2.0, 4.0]]
    """
    _check_floating(tensor, "all_gather_v")
    shapes = _exchange_shapes(tensor, comm, "all_gather_v")
    return _split(apply(tensor.reshape(-1), comm, "all_gather", [tensor.numel()], _numels(shapes)), shapes)


def all_to_all(tensors: Sequence[torch.Tensor], comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return, on rank r, every rank's `tensors[r]`, in rank order. Collective.

    The backward pass is an all_to_all of the gradients.

    Args:
        tensors: One tensor per rank, of one floating-point or complex dtype, with the same shape on all ranks.
        comm: The communicator.

    Returns:
        New tensors, one from each rank.

    Raises:
        ValueError, MismatchError: As for `all_gather`.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(2, requires_grad=True)
        ...     y = torch.stack(un.autograd.all_to_all(x.unbind(), comm))
        ...     (y * (comm.rank + 1)).sum().backward()
        ...     return x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [[1.0, 2.0], [1.0, 2.0]]
    """
    flat, counts = _flat_list(tensors, comm, "all_to_all", alike=True)
    return apply(flat, comm, "all_to_all", counts, counts).view(comm.size, *tensors[0].shape).unbind()


def all_to_all_v(tensors: Sequence[torch.Tensor], comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return, on rank r, every rank's `tensors[r]`; first dimensions may differ. Otherwise like `all_to_all`.

    Ranks exchange the shapes first, which breaks a `torch.compile` graph.

    Args:
        tensors: One tensor per rank, of one floating-point or complex dtype; first dimensions may differ.
        comm: The communicator.

    Returns:
        New tensors, one from each rank.

    Raises:
        ValueError, MismatchError: As for `all_gather_v`.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(1, requires_grad=True)
        ...     y = torch.cat(un.autograd.all_to_all_v([x.expand(r) for r in range(2)], comm))
        ...     y.sum().backward()
        ...     return y.tolist(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([], 1.0), ([1.0, 1.0], 1.0)]
    """
    flat, counts = _flat_list(tensors, comm, "all_to_all_v")
    shapes = _exchange_shapes(tensors, comm, "all_to_all_v")
    return _split(apply(flat, comm, "all_to_all", counts, _numels(shapes)), shapes)


def all_to_all_single(
    tensor: torch.Tensor,
    comm: Communicator,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the rows that all ranks send to this rank; the first rows of `tensor` are for rank 0. Collective.

    The backward pass is an all_to_all of the gradients, with input and output split sizes swapped.

    Args:
        tensor: Tensor of a floating-point or complex dtype, with at least one dimension.
        comm: The communicator.
        output_split_sizes: Number of rows to receive from each rank; if None, the number of rows of `tensor` divided by
            the number of ranks.
        input_split_sizes: Number of rows to send to each rank; equal numbers if None.

    Returns:
        A new tensor, with the rows from rank 0 first.

    Raises:
        ValueError: The dtype is neither floating-point nor complex, or the split sizes do not fit the tensor.
        MismatchError: Two ranks disagree about the number of rows that one sends to the other.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        ...     y = un.autograd.all_to_all_single(x, comm, [comm.rank + 1] * 2, [1, 2])
        ...     (y * (comm.rank + 1)).sum().backward()
        ...     return y.tolist(), x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([1.0, 1.0], [1.0, 2.0, 2.0]), ([2.0, 3.0, 2.0, 3.0], [1.0, 2.0, 2.0])]
    """
    _check_floating(tensor, "all_to_all_single")
    if not tensor.dim():
        raise ValueError("un.autograd.all_to_all_single takes a tensor with at least one dimension")
    rows = tensor.shape[0]
    width = math.prod(tensor.shape[1:])
    sends = _sizes(input_split_sizes, rows, comm.size, "input_split_sizes")
    receives = _sizes(output_split_sizes, rows, comm.size, "output_split_sizes")
    if sum(sends) != rows:
        raise ValueError(f"input_split_sizes add up to {sum(sends)}, but the tensor has {rows} rows")
    counts = [n * width for n in sends], [n * width for n in receives]
    return apply(tensor.reshape(-1), comm, "all_to_all", *counts).view(sum(receives), *tensor.shape[1:])


def _sizes(given: Sequence[int] | None, rows: int, size: int, name: str) -> list[int]:
    if given is None:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be divided evenly among {size} ranks; pass {name}")
        return [rows // size] * size
    if len(given) != size or any(n < 0 for n in given):
        raise ValueError(f"{name} must be {size} numbers of rows, one for each rank, none of them negative")
    return list(given)


def _numels(shapes: Sequence[torch.Size]) -> list[int]:
    return [shape.numel() for shape in shapes]


def _split(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
    return tuple(part.view(shape) for part, shape in zip(flat.split(_numels(shapes)), shapes, strict=True))


def all_reduce(
    tensor: torch.Tensor, comm: Communicator, op: str | ReduceOp = "sum", *, scale: float | None = None
) -> torch.Tensor:
    """Return the sum (or another reduction, `op`) of all ranks' tensors. Collective.

    For "sum", the gradient is the sum of all ranks' gradients of the result; for "avg", it is their mean. For "min" and
    "max", the sum of the gradients is shared evenly among the elements that equal the result. For "product", the sum of
    the gradients is multiplied by the product of the other ranks' elements.

    Args:
        tensor: Tensor of a floating-point or complex dtype, with the same number of elements on every rank.
        comm: The communicator.
        op: One of sum, avg, product, min, max.
        scale: As for `Communicator.all_reduce`. The gradient is also multiplied by `scale`.

    Returns:
        A new tensor with the shape of `tensor`.

    Raises:
        ValueError: The dtype is neither floating-point nor complex, `scale` does not suit `op`, or `op` has no
            gradient.
        MismatchError: Ranks call different collectives, in the forward or the backward pass.

    Cost: the cost of `Communicator.all_reduce` in the forward pass, and again in the backward pass. For "min" and
    "max", the backward pass sends twice as many bytes as the forward pass; for "product" on p ranks, up to p times as
    many.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = un.autograd.all_reduce(x, comm)
        ...     (y**2).sum().backward()
        ...     return y.item(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(3.0, 12.0), (3.0, 12.0)]
    """
    _check_floating(tensor, "all_reduce")
    if scale is not None:
        check_scale(scale, parse_op(op), tensor.dtype)
        # Make the next collective, the all_reduce below, also compare the ranks' scales.
        comm.agree(scale, "scale")
        tensor = tensor * scale
    n = [tensor.numel()]
    return apply(tensor.reshape(-1), comm, "all_reduce", n, n, _check_op(op, "all_reduce", REDUCTIONS)).view(
        tensor.shape
    )


def reduce(tensor: torch.Tensor, comm: Communicator, op: Any = "sum", dst: Any = 0) -> torch.Tensor:
    """Return the sum of all ranks' tensors on rank `dst`, and zeros on the other ranks. Collective.

    The gradient on every rank is the gradient of rank `dst`'s result; the other ranks' gradients are ignored.

    Args:
        tensor, comm: As for `all_reduce`.
        op: One of sum, avg.
        dst: Rank that gets the sum. As in `Communicator.reduce`, `op` and `dst` may be passed in either order.

    Returns:
        A new tensor with the shape of `tensor`.

    Raises:
        ValueError, MismatchError: As for `all_reduce`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = un.autograd.reduce(x, comm, dst=1)
        ...     (5 * y).sum().backward()
        ...     return y.item(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(0.0, 5.0), (3.0, 5.0)]
    """
    _check_floating(tensor, "reduce")
    op, dst = (dst or "sum", op) if isinstance(op, int) else (op, dst)
    check_rank(dst, "dst", comm.size)
    n = [tensor.numel()]
    return apply(tensor.reshape(-1), comm, "reduce", n, n, _check_op(op, "reduce", LINEAR), dst).view(tensor.shape)


def reduce_scatter(tensors: Sequence[torch.Tensor], comm: Communicator, op: str | ReduceOp = "sum") -> torch.Tensor:
    """Return, on rank r, the sum of every rank's `tensors[r]`. Collective.

    On every rank, `tensors[r]` gets the gradient of rank r's result.

    Args:
        tensors: One tensor per rank, of one floating-point or complex dtype. The tensors' shapes may differ, but
            `tensors[r]` must have the same shape on all ranks.
        comm: The communicator.
        op: One of sum, avg.

    Returns:
        A new tensor of the shape of `tensors[comm.rank]`.

    Raises:
        ValueError, MismatchError: As for `all_reduce`.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(2, 3, requires_grad=True)
        ...     y = un.autograd.reduce_scatter(x.unbind(), comm)
        ...     (y * (comm.rank + 1)).sum().backward()
        ...     return y.tolist(), x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")[0]
        ([2.0, 2.0, 2.0], [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    """
    flat, counts = _flat_list(tensors, comm, "reduce_scatter")
    op = _check_op(op, "reduce_scatter", LINEAR)
    result = apply(flat, comm, "reduce_scatter", counts, [counts[comm.rank]], op)
    return result.view(tensors[comm.rank].shape)


def _check_op(op: str | ReduceOp, name: str, known: tuple[str, ...]) -> str:
    """Return the name of `op`; raise `ValueError` unless it is in `known`, the reductions with a gradient."""
    found = parse_op(op).value
    if found in known:
        return found
    if found in REDUCTIONS:
        raise ValueError(f"un.autograd.{name} has no gradient for op={found!r}; use un.autograd.all_reduce, which has")
    raise ValueError(f"op={found!r} has no gradient; un.autograd.{name} takes {', '.join(known)}")


def broadcast(tensor: torch.Tensor, comm: Communicator, src: int) -> torch.Tensor:
    """Return rank `src`'s tensor. Collective.

    The gradient on rank `src` is the sum of all ranks' gradients; on the other ranks, the gradient is zero.

    Args:
        tensor: Tensor of a floating-point or complex dtype, with the same number of elements on every rank; only rank
            `src`'s elements are used.
        comm: The communicator.
        src: Rank whose tensor is sent.

    Returns:
        A new tensor of the same shape as this rank's `tensor`.

    Raises:
        ValueError: The dtype is neither floating-point nor complex.
        MismatchError: Ranks call different collectives, in the forward or the backward pass.

    Cost: one `Communicator.broadcast`, and one `reduce` in the backward pass.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = un.autograd.broadcast(x, comm, src=1)
        ...     (y * 5).sum().backward()
        ...     return y.item(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(2.0, 0.0), (2.0, 10.0)]
    """
    _check_floating(tensor, "broadcast")
    check_rank(src, "src", comm.size)
    n = [tensor.numel()]
    return apply(tensor.reshape(-1), comm, "broadcast", n, n, root=src).view(tensor.shape)


def gather(tensor: torch.Tensor, comm: Communicator, dst: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all ranks on rank `dst`, and zeros of the same shapes on the other ranks. Collective.

    The gradient of rank r's tensor is the gradient of entry r of rank `dst`'s result; the other ranks' gradients are
    ignored.

    Args:
        tensor: Tensor of a floating-point or complex dtype, with the same shape on all ranks.
        comm: The communicator.
        dst: Rank that receives.

    Returns:
        New tensors, one for each rank.

    Raises:
        ValueError, MismatchError: As for `broadcast`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = torch.cat(un.autograd.gather(x, comm, dst=1))
        ...     (y * torch.tensor([3.0, 4.0])).sum().backward()
        ...     return y.tolist(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([0.0, 0.0], 3.0), ([1.0, 2.0], 4.0)]
    """
    _check_floating(tensor, "gather")
    check_rank(dst, "dst", comm.size)
    n = tensor.numel()
    size = comm.size
    return apply(tensor.reshape(-1), comm, "gather", [n], [n] * size, root=dst).view(size, *tensor.shape).unbind()


def scatter(tensors: Sequence[torch.Tensor], comm: Communicator, src: int) -> torch.Tensor:
    """Return, on rank r, rank `src`'s `tensors[r]`. Collective.

    On rank `src`, the gradient of `tensors[r]` is the gradient of rank r's result; on the other ranks, it is zero.

    Args:
        tensors: One tensor per rank, of one floating-point or complex dtype, with the same shape on all ranks. Only
            rank `src`'s elements are used.
        comm: The communicator.
        src: Rank that sends.

    Returns:
        A new tensor.

    Raises:
        ValueError, MismatchError: As for `broadcast`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([3.0, 4.0], requires_grad=True)
        ...     y = un.autograd.scatter(x.unbind(), comm, src=1)
        ...     (y**2).sum().backward()
        ...     return y.item(), x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(3.0, [0.0, 0.0]), (4.0, [6.0, 8.0])]
    """
    flat, counts = _flat_list(tensors, comm, "scatter", alike=True)
    check_rank(src, "src", comm.size)
    return apply(flat, comm, "scatter", counts, counts[:1], root=src).view(tensors[0].shape)


def send(tensor: torch.Tensor, comm: Communicator, dst: int, tag: int = 0) -> torch.Tensor:
    """Send a tensor to rank `dst`, which calls `recv`; return a token that represents the message in the graph.

    The gradient of `tensor` is the gradient of rank `dst`'s result, sent back by the receiver's backward pass. To
    receive the gradient, this rank's backward pass must include the returned token: add `token.sum()`, which is 0, to
    the loss.

    Args:
        tensor: Tensor of a floating-point or complex dtype.
        comm: The communicator.
        dst: The receiving rank; must not be this rank.
        tag: As for `Communicator.send`.

    Returns:
        The token: an empty tensor with the dtype of `tensor`.

    Raises:
        ValueError: The dtype is neither floating-point nor complex.
        MismatchError: The receiver's backward pass sends the gradients of several messages in a different order than
            this rank's backward pass expects.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([3.0], requires_grad=True)
        ...     if comm.rank == 0:
        ...         un.autograd.send(x, comm, dst=1).sum().backward()
        ...     else:
        ...         (un.autograd.recv(x, comm, src=0) ** 2).sum().backward()
        ...     return x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [6.0, 0.0]
    """
    _check_floating(tensor, "send")
    check_rank(dst, "dst", comm.size, other_than=comm.rank)
    return apply(tensor.reshape(-1), comm, "send", [tensor.numel()], [0], root=dst, tag=tag)


def recv(tensor: torch.Tensor, comm: Communicator, src: int, tag: int = 0) -> torch.Tensor:
    """Return the tensor that rank `src` sends with `send`.

    The backward pass sends the result's gradient back to rank `src`.

    Args:
        tensor: Tensor with the shape, dtype and device that the result will have. The elements of `tensor` are not
            used, and its gradient is zero. If `tensor` requires a gradient, a second backward pass must include that
            gradient, whose graph contains the token (see `send`) of the message that the first backward pass sends.
        comm: The communicator.
        src: The sending rank; must not be this rank.
        tag: As for `Communicator.recv`.

    Returns:
        A new tensor.

    Raises:
        ValueError, MismatchError: As for `send`.

    Example: see `send`.
    """
    _check_floating(tensor, "recv")
    check_rank(src, "src", comm.size, other_than=comm.rank)
    # Pass an empty slice of the tensor, which only connects the result to the graph; no element is read.
    place = tensor.reshape(-1)[:0]
    n = tensor.numel()
    return apply(place, comm, "recv", [0], [n], root=src, tag=tag).view(tensor.shape)


def _check_floating(tensor: torch.Tensor, name: str) -> None:
    """Raise `TypeError` or `ValueError` if the tensor cannot have a gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"un.autograd.{name} takes a torch.Tensor, not {type(tensor).__name__}")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"un.autograd.{name} takes floating and complex tensors; {tensor.dtype} has no gradients: use comm.{name}"
        )


def _flat_list(
    tensors: Sequence[torch.Tensor], comm: Communicator, name: str, *, alike: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """Return the tensors, one per rank, joined into a flat tensor, and each tensor's number of elements.

    If `alike` is true, all of `tensors` must have the same shape.
    """
    if not isinstance(tensors, Sequence) or len(tensors) != comm.size:
        raise ValueError(f"un.autograd.{name} takes a list of {comm.size} tensors, one for each rank")
    for tensor in tensors:
        _check_floating(tensor, name)
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise ValueError(f"the tensors of un.autograd.{name} must have one dtype and be on one device")
        if alike and tensor.shape != tensors[0].shape:
            raise ValueError(
                f"the tensors of un.autograd.{name} must have one shape, not {tuple(tensors[0].shape)} and "
                f"{tuple(tensor.shape)}"
            )
    return torch.cat([tensor.reshape(-1) for tensor in tensors]), [tensor.numel() for tensor in tensors]


def _exchange_shapes(tensors: torch.Tensor | Sequence[torch.Tensor], comm: Communicator, name: str) -> list[torch.Size]:
    """Return the shapes of the tensors that this rank receives. Collective.

    Args:
        tensors: The input tensor or tensors of the `Communicator` method `name`.
        comm: The communicator.
        name: Name of the method, all_gather_v or all_to_all_v.
    """
    engine = engine_of(comm)
    engine.enter(name)
    with torch.no_grad():
        exchange = exchange_shapes(engine, COLLECTIVES[name], tensors)
    return [tensor.shape for tensor in exchange.output]
