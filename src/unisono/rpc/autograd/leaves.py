"""Gradients of one rank's leaves: collected without their hooks, and accumulated once, with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Leaves"]

_Gradients = Sequence[torch.Tensor | None]


class Leaves:
    """The leaves of all contexts of one rank.

    A backward pass over ranks comes to a leaf once for each message, and its hooks are to run once, with the sum. So a
    pass collects gradients while hooks of the leaves are switched off, and runs each leaf's AccumulateGrad node at its
    end: then hooks of the tensor, post-accumulate hooks, and those of DistributedDataParallel see what they see in a
    local `backward()`. The user's p.grad is put aside meanwhile.

    One lock serialises contexts. It is held while something waits for another rank only if a hook does, as those that
    average gradients do. A local `backward()` in another thread that comes to a leaf on a CPU waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def differentiate(
        self,
        outputs: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor] | None,
        *,
        retain_graph: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """As `torch.autograd.grad`, but hooks of the leaves do not run."""
        with self._lock, self._guarded(leaves, muted=True):
            return torch.autograd.grad(outputs, leaves, starts, retain_graph=retain_graph, allow_unused=True)

    def accumulate(self, gradients: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Run the AccumulateGrad node of each leaf with its gradient: p.grad as the hooks leave it, in its own memory.

        The user's p.grad is afterwards what it was, also if a hook raises.
        """
        leaves = [leaf for leaf in gradients if leaf.requires_grad]
        with self.swapped(leaves), self._guarded(leaves, muted=False):
            torch.autograd.backward(leaves, [gradients[leaf] for leaf in leaves])
            # It may lie in a bucket, which the next pass writes.
            return {leaf: leaf.grad.detach().clone() for leaf in leaves if leaf.grad is not None}

    @contextmanager
    def swapped(
        self, leaves: Sequence[torch.Tensor], gradients: dict[torch.Tensor, torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Replace p.grad of some leaves for a while: by these gradients, or by None."""
        with self._lock:
            before = [leaf.grad for leaf in leaves]
            try:
                for leaf in leaves:
                    leaf.grad = (gradients or {}).get(leaf)
                yield
            finally:
                for leaf, grad in zip(leaves, before, strict=True):
                    leaf.grad = grad

    @contextmanager
    def _guarded(self, leaves: Sequence[torch.Tensor], *, muted: bool) -> Iterator[None]:
        """Hold up other threads before they add to these leaves; if `muted`, switch off hooks in this one."""
        with self._lock:
            own = [leaf._backward_hooks for leaf in leaves]
            hooks = [dict(each or {}) for each in own]
            handles = []
            try:
                for leaf, known, saved in zip(leaves, own, hooks, strict=True):
                    if known:
                        known.clear()
                    handles.append(leaf.register_hook(self._guard(leaf.is_cpu, list(saved.values()) if muted else [])))
                    if known is not None and not muted:
                        known.update(saved)
                yield
            finally:
                for handle in handles:
                    handle.remove()
                for known, saved in zip(own, hooks, strict=True):
                    if known is not None and muted:
                        further = dict(known)
                        known.clear()
                        known.update(saved | further)

    def _guard(self, on_cpu: bool, hooks: list[Callable[..., Any]]) -> Callable[[torch.Tensor], torch.Tensor]:
        """A hook of a leaf that lets other threads in when the lock is free; those run its hooks themselves."""
        here = threading.get_ident()

        def guard(gradient: torch.Tensor) -> torch.Tensor:
            # Elsewhere than on a CPU, hooks run in threads of autograd.
            if not on_cpu or threading.get_ident() == here:
                return gradient
            with self._lock:
                pass
            for hook in hooks:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            return gradient

        return guard
