"""Computes and clips norms of gradients, for plain parameters and for shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unisono.communicator import Communicator

__all__ = ["clip_grad_norm_", "grad_norm"]


def grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], comm: Communicator | None = None, norm_type: float = 2.0
) -> torch.Tensor:
    """Return the norm of the vector of all gradients; bitwise identical on every rank.

    Args:
        parameters: Tensors. Tensors without a gradient are skipped.
        comm: Communicator of the ranks if each has a disjoint shard, as in a sharded optimizer or model; None if each
            rank has all parameters. With a communicator, this call is collective, and ranks may have different numbers
            of tensors.
        norm_type: Order of the norm: a positive number, or infinity for the largest absolute value.

    Returns:
        A 0-d tensor: without a communicator, the result of torch's `get_total_norm`; otherwise a float64 tensor. The
        norm is infinite or nan if any rank's gradient is.

    Raises:
        ValueError: `norm_type` is not positive.

    Cost: one pass over the gradients, and with a communicator, an exchange of 8 bytes per rank.

    Example:
        >>> def program(comm):
        ...     part = torch.zeros(2, requires_grad=True)
        ...     part.grad = torch.tensor([3.0, 0.0]) if comm.rank == 0 else torch.tensor([0.0, 4.0])
        ...     return un.utils.grad_norm([part], comm).item()
        >>> un.launch(program, 2, "thread")
        [5.0, 5.0]
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, not {norm_type}")
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    with torch.no_grad():
        own = get_total_norm([p.grad for p in tensors if p.grad is not None and p.grad.numel()], norm_type)
        if comm is None:
            return own
        norms = torch.empty(comm.size, dtype=torch.float64, device=comm.device)
        comm.all_gather_single(norms, own.to(comm.device, torch.float64).reshape(1))
        total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type).to(own.device)
        return total


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    comm: Communicator | None = None,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`. Every rank uses the same factor.

    Args:
        parameters, comm, norm_type: As for `grad_norm`.
        max_norm: Maximum norm of the scaled gradients, up to rounding.
        error_if_nonfinite: Whether to raise an error if the norm is infinite or nan. If False, the scaling factor is
            computed from the infinite or nan norm, as in torch.

    Returns:
        The norm before scaling; see `grad_norm`.

    Raises:
        RuntimeError: The norm is not finite, and `error_if_nonfinite` is set. Raised on every rank; gradients are
            unchanged.
        ValueError: `norm_type` is not positive.

    Cost: the cost of `grad_norm`, plus a second pass over the gradients.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([30.0, 40.0])
        >>> un.utils.clip_grad_norm_(weight, 5.0), weight.grad
        (tensor(50.), tensor([3.0000, 4.0000]))
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = grad_norm(tensors, comm, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}; gradients are unchanged")
    clip_grads_with_norm_(tensors, max_norm, norm)
    return norm
