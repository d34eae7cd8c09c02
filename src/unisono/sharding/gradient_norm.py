"""Norm of gradients of which each rank has a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.communicator import Communicator

__all__ = ["clip_shards_"]


def clip_shards_(
    pieces: Sequence[torch.Tensor], comm: Communicator, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients of pieces so that their norm over all ranks is at most `max_norm`. Collective.

    Args:
        pieces: This rank's slices of parameters, some with `.grad`.
        comm: The ranks with the other slices.
        max_norm: Maximum norm.
        norm_type: Order of the norm: positive, or `inf`.

    Returns: The norm before, equal on all ranks.

    Raises:
        ValueError: `norm_type` is not positive.

    Example:
        >>> from unisono.sharding.gradient_norm import clip_shards_
        >>> def program(comm):
        ...     piece = torch.zeros(1)
        ...     piece.grad = torch.tensor([3.0 + comm.rank])
        ...     return clip_shards_([piece], comm, 1.0).item(), round(piece.grad.item(), 3)
        >>> un.launch(program, 2, "thread")
        [(5.0, 0.6), (5.0, 0.8)]
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, not {norm_type}")
    grads = [piece.grad for piece in pieces if piece.grad is not None and piece.numel()]
    largest = norm_type == float("inf")
    total = torch.nn.utils.get_total_norm(grads, norm_type).to(comm.device, torch.float64)
    total = total if largest else total**norm_type
    comm.all_reduce(total, "max" if largest else "sum")
    total = total if largest else total ** (1 / norm_type)
    for grad in grads:
        grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0).to(grad.device, grad.dtype))
    return total
