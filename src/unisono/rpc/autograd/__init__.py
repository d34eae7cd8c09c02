"""Distributed autograd: gradients flow back through the ranks that sent the tensors.

    with un.rpc.autograd.context() as ctx:
        loss = un.rpc.rpc_sync("worker1", forward, args=(x,)).sum()
        un.rpc.autograd.backward(ctx, [loss])
        grads = un.rpc.autograd.get_gradients(ctx)

Within a context, caller and callee record arguments and results that are tensors with an autograd history. Gradients
are stored in the context, on the rank of each leaf, and never in `.grad`, so backward passes started by several ranks
over shared parameters do not mix. A leaf's hooks (tensor hooks, post-accumulate hooks, and the hooks of
`DistributedDataParallel` and `GradientAverager`) run once per backward pass, with the sum of all messages' gradients.
The value that hooks leave in `.grad` is stored as the gradient, and `.grad` is then restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from unisono.rpc import context as current
from unisono.rpc.autograd.engine import current_contexts, find, start

__all__ = ["backward", "context", "get_gradients"]


@contextmanager
def context() -> Iterator[int]:
    """Record the tensors that ranks send one another, for `backward`.

    Remote functions called within the context, and callbacks of `rpc_async` futures, also run in the context. When the
    context ends, all ranks discard its record and gradients.

    Yields: The context's number, which may be sent to other ranks.

    Example:
        >>> @un.rpc.expose
        ... def scale(x, w): return x * w
        >>> def program(comm):
        ...     un.rpc.init(comm)
        ...     gradient = None
        ...     if comm.rank == 0:
        ...         w = torch.tensor(3.0, requires_grad=True)
        ...         with un.rpc.autograd.context() as ctx:
        ...             loss = un.rpc.rpc_sync(1, scale, args=(torch.tensor(2.0), w))
        ...             un.rpc.autograd.backward(ctx, [loss])
        ...             gradient = un.rpc.autograd.get_gradients(ctx)[w].item()
        ...     un.rpc.shutdown()
        ...     return gradient
        >>> un.launch(program, 2, "thread")
        [2.0, None]
    """
    found = current_contexts()
    number = found.begin()
    before = current.context.set(number)
    try:
        yield number
    finally:
        current.context.reset(before)
        found.discard(number)


def backward(context: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Back-propagate from some tensors through all ranks involved. Returns when all ranks are done.

    Args:
        context: Number of the context in which the roots were computed.
        roots: Tensors on this rank, with one element each.
        retain_graph: Whether to keep the graph for another backward pass.

    Raises:
        TypeError: A root is not a tensor; for an `RRef`, use its `backward` method.
        ValueError: There is no root, or a root has several elements or no autograd history.
        CommError: The context does not exist.
        RuntimeError: The graph was freed by an earlier backward pass that did not retain it, or a tensor was received
            in another context.
        PeerLostError: A rank on the path of the gradients has died.

    Cost: two round trips per message on the path of the gradients, one to discover the message and one to send its
    gradients.
    """
    start(find(context), roots, retain_graph)


def get_gradients(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's leaves in a context, by leaf; empty if there are none.

    Args:
        context: Number of the context.

    Raises:
        CommError: The context has ended, and its gradients have been discarded.
    """
    found = current_contexts().ongoing(context)
    return {} if found is None else dict(found.gradients)
