"""`torch.distributed.autograd`, and `torch.distributed.optim.DistributedOptimizer`, which uses autograd contexts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unisono import rpc
from unisono.interop.torch_rpc.constants import as_runtime_error
from unisono.rpc import autograd
from unisono.rpc.autograd.engine import current_contexts
from unisono.rpc.protocol import NO_CONTEXT

__all__ = ["DistributedOptimizer", "backward", "checked", "context", "get_gradients"]


@contextmanager
def context() -> Iterator[int]:
    """Record the tensors sent between ranks in the block, for `backward`; yield the context's number. Not nestable."""
    if rpc.context.context.get() != NO_CONTEXT:
        raise RuntimeError(
            "there is an autograd context in this thread already; leave it before entering another context"
        )
    with autograd.context() as number:
        yield number


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Back-propagate from one-element tensors; the leaves' gradients are kept in the context.

    Raises:
        TypeError: The roots are not a list of tensors.
        RuntimeError: The context does not exist, a root is invalid, or the backward pass failed on some rank.
    """
    checked(context_id)
    if not isinstance(roots, list | tuple) or not all(isinstance(root, torch.Tensor) for root in roots):
        raise TypeError("backward() needs a list of tensors")
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    with as_runtime_error():
        autograd.backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradient of each leaf on this rank. Raises RuntimeError if this rank does not know the context."""
    return autograd.get_gradients(checked(context_id))


def checked(context_id: Any) -> int:
    """Return `context_id`; raise RuntimeError if this rank does not know the context."""
    if not isinstance(context_id, int):
        raise TypeError(f"context_id must be an int, not a {type(context_id).__name__}")
    if current_contexts().get(context_id) is None:
        raise RuntimeError(f"Could not find autograd context with id: {context_id}")
    return context_id


class DistributedOptimizer(rpc.DistributedOptimizer):
    """A torch optimizer on every rank that owns some of the parameters.

    Args:
        optimizer_class: Any subclass of `torch.optim.Optimizer`.
        params_rref: Remote references to parameters.
        args, kwargs: Arguments for the optimizer.
    """

    def step(self, context_id: int) -> None:
        """Update the parameters with a context's gradients. Raises RuntimeError if the context does not exist."""
        super().step(checked(context_id))
