"""Differentiable collectives in which every rank sends and receives: all_gather, all_to_all, and their other forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from unisono.autograd.adjoints import apply
from unisono.autograd.operator import check_floating, exchange_shapes, flat_list
from unisono.communicator import Communicator

__all__ = ["all_gather", "all_gather_v", "all_to_all", "all_to_all_single", "all_to_all_v"]


def all_gather(tensor: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all ranks, in the order of ranks. Collective.

    The gradient of rank r's tensor is the sum of all ranks' gradients of entry r. `torch.cat` joins the entries along
    any dimension.

    Args:
        tensor: Of a floating or complex dtype, of one shape on all ranks.
        comm: The communicator.

    Returns:
        New tensors, one for each rank.

    Raises:
        ValueError: The dtype has no gradient.
        MismatchError: Ranks make different calls, also in a backward pass.

    Cost: as `Communicator.all_gather`; in backward, as `reduce_scatter`.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        ...     y = torch.cat(un.autograd.all_gather(x, comm))
        ...     y.prod().backward()
        ...     return y.tolist(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([1.0, 2.0], 4.0), ([1.0, 2.0], 2.0)]
    """
    check_floating(tensor, "all_gather")
    n = tensor.numel()
    size = comm.size
    return apply(tensor.reshape(-1), comm, "all_gather", [n], [n] * size).view(size, *tensor.shape).unbind()


def all_gather_v(tensor: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all ranks, which may differ in their first dimension. Otherwise as `all_gather`.

    Ranks exchange the shapes first, which ends a graph of `torch.compile`.

    Args:
        tensor: Of a floating or complex dtype; on other ranks the first dimension may differ.
        comm: The communicator.

    Returns:
        New tensors, one for each rank.

    Raises:
        MismatchError: Ranks' tensors differ in dtype or in another dimension.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(comm.rank + 1, requires_grad=True)
        ...     y = torch.cat(un.autograd.all_gather_v(x, comm))
        ...     (y * torch.arange(3)).sum().backward()
        ...     return x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [[0.0], [2.0, 4.0]]
    """
    check_floating(tensor, "all_gather_v")
    shapes = exchange_shapes(tensor, comm, "all_gather_v")
    return _split(apply(tensor.reshape(-1), comm, "all_gather", [tensor.numel()], _numels(shapes)), shapes)


def all_to_all(tensors: Sequence[torch.Tensor], comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return on rank r what each rank s has as `tensors[r]`, in the order of ranks. Collective.

    The gradients are exchanged in the same way.

    Args:
        tensors: One tensor a rank, of one floating or complex dtype, and one shape on all ranks.
        comm: The communicator.

    Returns:
        New tensors, one from each rank.

    Raises:
        ValueError, MismatchError: As `all_gather`.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(2, requires_grad=True)
        ...     y = torch.stack(un.autograd.all_to_all(x.unbind(), comm))
        ...     (y * (comm.rank + 1)).sum().backward()
        ...     return x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [[1.0, 2.0], [1.0, 2.0]]
    """
    flat, counts = flat_list(tensors, comm, "all_to_all", alike=True)
    return apply(flat, comm, "all_to_all", counts, counts).view(comm.size, *tensors[0].shape).unbind()


def all_to_all_v(tensors: Sequence[torch.Tensor], comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Return what each rank has for this one, where first dimensions may differ. Otherwise as `all_to_all`.

    Ranks exchange the shapes first, which ends a graph of `torch.compile`.

    Args:
        tensors: One tensor a rank, of one floating or complex dtype; any of them may differ in the first dimension.
        comm: The communicator.

    Returns:
        New tensors, one from each rank.

    Raises:
        ValueError, MismatchError: As `all_gather_v`.

    Example:
        >>> def program(comm):
        ...     x = torch.ones(1, requires_grad=True)
        ...     y = torch.cat(un.autograd.all_to_all_v([x.expand(r) for r in range(2)], comm))
        ...     y.sum().backward()
        ...     return y.tolist(), x.grad.item()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([], 1.0), ([1.0, 1.0], 1.0)]
    """
    flat, counts = flat_list(tensors, comm, "all_to_all_v")
    shapes = exchange_shapes(tensors, comm, "all_to_all_v")
    return _split(apply(flat, comm, "all_to_all", counts, _numels(shapes)), shapes)


def all_to_all_single(
    tensor: torch.Tensor,
    comm: Communicator,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the rows that all ranks have for this one; the first rows of `tensor` are for rank 0. Collective.

    The gradients are exchanged in the same way, with the sizes transposed.

    Args:
        tensor: Of a floating or complex dtype, with at least one dimension.
        comm: The communicator.
        output_split_sizes: Rows from each rank; equal parts, as many rows as `tensor` has, if None.
        input_split_sizes: Rows for each rank; equal parts if None.

    Returns:
        A new tensor, with the rows from rank 0 first.

    Raises:
        ValueError: The dtype has no gradient, or the sizes do not fit.
        MismatchError: Two ranks disagree about the rows that one sends to the other.

    Example:
        >>> def program(comm):
        ...     x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        ...     y = un.autograd.all_to_all_single(x, comm, [comm.rank + 1] * 2, [1, 2])
        ...     (y * (comm.rank + 1)).sum().backward()
        ...     return y.tolist(), x.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [([1.0, 1.0], [1.0, 2.0, 2.0]), ([2.0, 3.0, 2.0, 3.0], [1.0, 2.0, 2.0])]
    """
    check_floating(tensor, "all_to_all_single")
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
