"""Synchronous SGD in two calls: one before training, and one after each `backward()`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from unisono.communicator import Communicator, engine_of
from unisono.gradients.sparse import average_sparse, sparse_parameters
from unisono.gradients.weights import ErrorContext, Weights, warn_of_uneven_batches
from unisono.utils.flatten import MIB, buckets, flat_apply
from unisono.utils.parameters import (
    Named,
    agree_on_parameters,
    check_parameters,
    named_tensors,
    share,
    warn_of_norm_limits,
)

__all__ = ["average_gradients", "broadcast_parameters"]

_compared: WeakKeyDictionary[Communicator, dict[object, int]] = WeakKeyDictionary()
"""For each communicator, the parameter lists that its ranks have compared, each with a number that all ranks share."""


def average_gradients(
    model: torch.nn.Module | Iterable[torch.Tensor], comm: Communicator, *, bucket_cap_mb: float = 25
) -> None:
    """Replace each gradient with its mean over all ranks. Call this between `backward()` and `step()`.

    Collective. Works in place on `p.grad`. A parameter without a gradient contributes zeros, so ranks that skipped a
    branch stay consistent with ranks that took it. If no rank has a gradient, `p.grad` remains None, and the optimizer
    leaves the parameter unchanged.

    Args:
        model: A module, or its parameters.
        comm: Communicator of the ranks whose gradients are averaged; all of them need the same parameters.
        bucket_cap_mb: Maximum message size in MiB; gradients are packed into messages.

    Raises:
        MismatchError: Ranks have different parameters; the error names the first difference.
        TypeError: `model` is a single tensor, or contains something other than tensors.
        ValueError: `model` is an exhausted iterator, or `bucket_cap_mb` is less than one byte.
        CommError: A message failed. All gradients are unusable, because some may be means and others partial sums.
            Compute them again.

    Cost: one all_reduce of the gradients, split into a few messages; two copies of the gradients; and one all_gather of
    16 bytes. The first call for a set of parameters also compares their names and shapes in one all_gather. If ranks
    have gradients for different parameters, there is one more all_reduce, of one byte per parameter.

    Example:
        >>> def program(comm):
        ...     w = torch.zeros(2, requires_grad=True)
        ...     (w * (comm.rank + 1.0)).sum().backward()
        ...     un.average_gradients([w], comm)
        ...     return w.grad.tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [[1.5, 1.5], [1.5, 1.5]]
    """
    warn_of_uneven_batches(engine_of(comm))
    named = named_tensors(model)
    trained = [(name, p) for name, p in named if p.requires_grad]
    spread = sparse_parameters(model) if isinstance(model, torch.nn.Module) else set()
    dense = [p for _, p in trained if id(p) not in spread]
    present = torch.tensor([p.grad is not None for p in dense], dtype=torch.uint8, device=comm.device)
    digest = int.from_bytes(hashlib.blake2b(bytes(present.tolist()), digest_size=7).digest(), "big")
    if not _compare(model, named, comm, frozen=True, digest=digest):
        comm.all_reduce(present, "max")
    gradients = [_dense_gradient(p) for p, there in zip(dense, present.tolist(), strict=True) if there]
    with torch.no_grad(), ErrorContext("averaging gradients in place, which are lost now: compute them again"):
        average_sparse([pair for pair in trained if id(pair[1]) in spread], comm, Weights(comm))
        for bucket in buckets(gradients, int(bucket_cap_mb * MIB)):
            flat_apply(bucket, lambda flat: comm.all_reduce(flat, op="avg"))


def broadcast_parameters(
    model: torch.nn.Module | Iterable[torch.Tensor], comm: Communicator, src: int = 0, *, bucket_cap_mb: float = 25
) -> None:
    """Make every rank's parameters and buffers equal to rank `src`'s. Call this once, before training.

    Collective. Works in place, and includes a module's buffers. Different parameters may be frozen on different ranks.

    Args:
        model, comm, bucket_cap_mb: As in `average_gradients`.
        src: The rank whose values all ranks receive.

    Raises:
        MismatchError, TypeError, ValueError: As for `average_gradients`.

    Cost: one broadcast of the parameters, split into a few messages; two copies of the parameters; and one all_gather
    of 16 bytes.

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 2)
        ...     un.broadcast_parameters(model, comm)
        ...     return model.weight.tolist()
        >>> weights = un.launch(program, nprocs=2, backend="thread")
        >>> weights[0] == weights[1]
        True
    """
    named = named_tensors(model, buffers=isinstance(model, torch.nn.Module))
    _compare(model, named, comm, frozen=False)
    share(named, comm, src, int(bucket_cap_mb * MIB), model=model)


def _compare(model: object, named: Named, comm: Communicator, *, frozen: bool, digest: int = 0) -> bool:
    """Check that ranks pass the same tensors. Compare a new list in detail, and a known list by its number.

    Return whether `digest` is the same on all ranks.
    """
    known = _compared.setdefault(comm, {})
    kind = (frozen, *((name, t.shape, t.dtype, t.device, frozen and t.requires_grad) for name, t in named))
    number = known.get(kind, -1)
    if number < 0:
        check_parameters(named)
        warn_of_norm_limits(model)
    gathered = torch.empty(2 * comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(gathered, torch.tensor([number, digest], device=comm.device))
    numbers, digests = gathered.view(comm.size, 2).t().tolist()
    if number < 0 or set(numbers) != {number}:
        agree_on_parameters(named, comm, frozen=frozen)
        known[kind] = len(known)
    return len(set(digests)) == 1


def _dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout != torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad
