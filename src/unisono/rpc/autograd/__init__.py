"""Distributed autograd: gradients flow back through the ranks that sent the tensors.

    with un.rpc.autograd.context() as ctx:
        loss = un.rpc.rpc_sync("worker1", forward, args=(x,)).sum()
        un.rpc.autograd.backward(ctx, [loss])
        grads = un.rpc.autograd.get_gradients(ctx)

Within a context, tensors with a history in arguments or results of calls are recorded on both sides. Gradients are kept
in the context, on the rank of each leaf, and never in `.grad`, so passes started by several ranks over shared
parameters do not mix. A leaf's hooks (tensor hooks, post-accumulate hooks, and those of `DistributedDataParallel` and
`GradientAverager`) run once per pass, with the sum over all messages. Whatever they leave in `.grad` becomes the
gradient, and `.grad` is then restored.
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
    """Record tensors that cross ranks, for `backward`.

    Remote functions called within the context, and callbacks of `rpc_async` futures, run in it as well. When
    the context ends, all ranks discard the record and the gradients.

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
    """Back-propagate from some tensors through all ranks involved. Returns when all are done.

    Args:
        context: The number of the context in which they were computed.
        roots: Tensors on this rank, with one element each.
        retain_graph: Whether to keep the graph for another pass.

    Raises:
        TypeError: A root is not a tensor; for references, use their `backward`.
        ValueError: There is no root, or one has several elements or no history.
        CommError: There is no such context.
        RuntimeError: The graph was freed by an earlier pass that did not retain it, or a tensor was received in another
        context.
        PeerLostError: A rank on the path of the gradients has died.

    Cost: one round trip per message traversed backward, and one more per message to discover it.
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
