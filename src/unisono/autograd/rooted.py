"""Differentiable broadcast, gather and scatter, and messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.autograd.adjoints import apply
from unisono.autograd.operator import check_floating, flat_list
from unisono.collectives.arguments import check_rank
from unisono.communicator import Communicator

__all__ = ["broadcast", "gather", "recv", "scatter", "send"]


def broadcast(tensor: torch.Tensor, comm: Communicator, src: int) -> torch.Tensor:
    """Return rank `src`'s tensor. Collective.

    The gradient on rank `src` is the sum of all ranks' gradients; it is zero on the other ranks.

    Args:
        tensor: Of a floating or complex dtype, with as many elements on every rank; only rank `src`'s elements are
            used.
        comm: The communicator.
        src: The rank whose tensor is sent.

    Returns:
        A new tensor of this rank's shape.

    Raises:
        ValueError: The dtype has no gradient.
        MismatchError: Ranks make different calls, also in a backward pass.

    Cost: as `Communicator.broadcast`; in backward, as `reduce`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = un.autograd.broadcast(x, comm, src=1)
        ...     (y * 5).sum().backward()
        ...     return y.item(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(2.0, 0.0), (2.0, 10.0)]
    """
    check_floating(tensor, "broadcast")
    check_rank(src, "src", comm.size)
    n = [tensor.numel()]
    return apply(tensor.reshape(-1), comm, "broadcast", n, n, root=src).view(tensor.shape)


def gather(tensor: torch.Tensor, comm: Communicator, dst: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all ranks on rank `dst`, and as many zeros on the other ranks. Collective.

    The gradient of rank r's tensor is that of entry r on rank `dst`; the other ranks' own gradients are ignored.

    Args:
        tensor: Of a floating or complex dtype, of one shape on all ranks.
        comm: The communicator.
        dst: The rank that receives.

    Returns:
        New tensors, one for each rank.

    Raises:
        ValueError, MismatchError: As `broadcast`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = torch.cat(un.autograd.gather(x, comm, dst=1))
        ...     (y * torch.tensor([3.0, 4.0])).sum().backward()
        ...     return y.tolist(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([0.0, 0.0], 3.0), ([1.0, 2.0], 4.0)]
    """
    check_floating(tensor, "gather")
    check_rank(dst, "dst", comm.size)
    n = tensor.numel()
    size = comm.size
    return apply(tensor.reshape(-1), comm, "gather", [n], [n] * size, root=dst).view(size, *tensor.shape).unbind()


def scatter(tensors: Sequence[torch.Tensor], comm: Communicator, src: int) -> torch.Tensor:
    """Return rank `src`'s `tensors[r]` on rank r. Collective.

    The gradient of rank `src`'s `tensors[r]` is that of rank r's result; it is zero on the other ranks.

    Args:
        tensors: One tensor a rank, of one floating or complex dtype, and one shape on all ranks; only rank `src`'s
            elements are used.
        comm: The communicator.
        src: The rank that sends.

    Returns:
        A new tensor.

    Raises:
        ValueError, MismatchError: As `broadcast`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([3.0, 4.0], requires_grad=True)
        ...     y = un.autograd.scatter(x.unbind(), comm, src=1)
        ...     (y**2).sum().backward()
        ...     return y.item(), x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [(3.0, [0.0, 0.0]), (4.0, [6.0, 8.0])]
    """
    flat, counts = flat_list(tensors, comm, "scatter", alike=True)
    check_rank(src, "src", comm.size)
    return apply(flat, comm, "scatter", counts, counts[:1], root=src).view(tensors[0].shape)


def send(tensor: torch.Tensor, comm: Communicator, dst: int, tag: int = 0) -> torch.Tensor:
    """Send a tensor to rank `dst`, which calls `recv`; return an empty tensor that stands for it in the graph.

    The gradient is that of rank `dst`'s result. The receiver's backward pass sends it, so this rank's must include the
    token: add `token.sum()`, which is 0, to the loss.

    Args:
        tensor: Of a floating or complex dtype.
        comm: The communicator.
        dst: Another rank.
        tag: As for `Communicator.send`.

    Returns:
        The token: a tensor of no elements, of the same dtype.

    Raises:
        ValueError: The dtype has no gradient.
        MismatchError: The receiver's backward pass sends the gradients of several messages in another order.

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
    check_floating(tensor, "send")
    check_rank(dst, "dst", comm.size, other_than=comm.rank)
    return apply(tensor.reshape(-1), comm, "send", [tensor.numel()], [0], root=dst, tag=tag)


def recv(tensor: torch.Tensor, comm: Communicator, src: int, tag: int = 0) -> torch.Tensor:
    """Return the tensor that rank `src` sends by `send`.

    In a backward pass the gradient of the result is sent back.

    Args:
        tensor: Of the shape, dtype and device to receive; its elements are not used, and its gradient is zero. If it
            requires a gradient, that is the token of the message in a second backward pass.
        comm: The communicator.
        src: Another rank.
        tag: As for `Communicator.recv`.

    Returns:
        A new tensor.

    Raises:
        ValueError, MismatchError: As `send`.

    Example: see `send`.
    """
    check_floating(tensor, "recv")
    check_rank(src, "src", comm.size, other_than=comm.rank)
    # No element is read: what is passed on is the place in the graph.
    place = tensor.reshape(-1)[:0]
    n = tensor.numel()
    return apply(place, comm, "recv", [0], [n], root=src, tag=tag).view(tensor.shape)
