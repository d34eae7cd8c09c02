"""Gradients of one rank's leaves: collected without running their hooks, then accumulated once, with hooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.core import clock

__all__ = ["Leaves"]

_PATIENCE_S = 1.0


class Leaves:
    """Leaves of all contexts of one rank.

    A distributed backward pass reaches a leaf once per message, but the leaf's hooks must run once, with the sum. The
    pass therefore collects gradients with hooks disabled, and runs each leaf's AccumulateGrad node at the end: tensor
    hooks, post-accumulate hooks and the hooks of DistributedDataParallel see the same gradient as in a local
    `backward()`. The user's p.grad is saved and restored.

    One lock serializes the computation of gradients. The lock is not held while hooks run, because hooks that average
    gradients may wait for other ranks, which may in turn wait for this rank; only the leaves whose hooks run are
    reserved. A local `backward()` in another thread waits until a CPU leaf is free before adding to its gradient. On
    other devices, hooks run in autograd's threads, and the local backward pass does not wait.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._used: dict[int, int] = {}
        self._watched = WeakTensorKeyDictionary()
        self._adding: dict[int, int] = {}

    def watch(self, leaves: Sequence[torch.Tensor]) -> None:
        """Make local backward passes wait at the given CPU leaves while a distributed backward pass uses them."""
        for leaf in leaves:
            with self._lock:
                if leaf.is_cpu and leaf not in self._watched:
                    self._watched[leaf] = None
                    leaf.register_hook(partial(self._begin, id(leaf)))
                    leaf.register_post_accumulate_grad_hook(self._end)

    def _begin(self, leaf: int, gradient: torch.Tensor) -> None:
        """Hook that runs before a backward pass adds to a leaf's gradient."""
        with self._freed:
            self._freed.wait_for(lambda: self._free([leaf]))
            self._adding[leaf] = threading.get_ident()

    def _end(self, leaf: torch.Tensor) -> None:
        self._adding.pop(id(leaf), None)

    @contextmanager
    def _alone(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Reserve some leaves for this thread during the `with` block."""
        here = threading.get_ident()
        numbers = [id(leaf) for leaf in leaves]
        with self._freed:
            self._freed.wait_for(lambda: self._free(numbers))
            # A hook may re-enter this context, so skip leaves that the outer context has reserved and will release.
            taken = [number for number in numbers if number not in self._used]
            self._used.update(dict.fromkeys(taken, here))
        try:
            until = clock.now() + _PATIENCE_S
            while any(self._adding.get(number, here) != here for number in numbers):
                if clock.now() > until:
                    # Don't wait any longer: a local backward pass has probably failed in a user's hook, between
                    # `_begin` and `_end`.
                    self._adding.clear()
                # Let other threads continue.
                time.sleep(1e-5)
            yield
        finally:
            with self._freed:
                for number in taken:
                    self._used.pop(number, None)
                # If a hook raised an error, its leaf is still in `_adding`, so remove it.
                for number in numbers:
                    self._adding.pop(number, None)
                self._freed.notify_all()

    def _free(self, leaves: Sequence[int]) -> bool:
        """Return whether no other thread uses any of the given leaves."""
        here = threading.get_ident()
        return all(self._used.get(leaf, here) == here for leaf in leaves)

    def differentiate(
        self,
        outputs: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor] | None,
        *,
        retain_graph: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute gradients like `torch.autograd.grad`, but without running the leaves' hooks."""
        elsewhere = [leaf for leaf in leaves if not leaf.is_cpu]
        with self._alone(elsewhere), self._lock, _without_hooks(leaves, self._lock):
            return torch.autograd.grad(outputs, leaves, starts, retain_graph=retain_graph, allow_unused=True)

    def accumulate(self, gradients: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Run each leaf's AccumulateGrad node with its gradient; return copies of p.grad as left by the hooks.

        The user's p.grad is restored afterwards, even if a hook raises.
        """
        leaves = [leaf for leaf in gradients if leaf.requires_grad]
        with self.swapped(leaves):
            torch.autograd.backward(leaves, [gradients[leaf] for leaf in leaves])
            # Copy p.grad: it may be a view of a bucket, which the next backward pass overwrites.
            return {leaf: leaf.grad.detach().clone() for leaf in leaves if leaf.grad is not None}

    @contextmanager
    def swapped(
        self, leaves: Sequence[torch.Tensor], gradients: dict[torch.Tensor, torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Temporarily replace p.grad of some leaves with the given gradients, or with None."""
        with self._alone(leaves):
            before = [leaf.grad for leaf in leaves]
            try:
                for leaf in leaves:
                    leaf.grad = (gradients or {}).get(leaf)
                yield
            finally:
                for leaf, grad in zip(leaves, before, strict=True):
                    leaf.grad = grad


@contextmanager
def _without_hooks(leaves: Sequence[torch.Tensor], lock: threading.RLock) -> Iterator[None]:
    """Disable leaves' hooks in this thread. Other threads run the hooks of CPU leaves, once `lock` is free."""
    saved = [(leaf, table, dict(table)) for leaf in leaves if (table := leaf._backward_hooks)]
    try:
        for leaf, table, hooks in saved:
            table.clear()
            table[next(iter(hooks))] = _elsewhere(list(hooks.values()), lock, leaf.is_cpu)
        yield
    finally:
        for _, table, hooks in saved:
            further = {number: hook for number, hook in table.items() if number not in hooks}
            table.clear()
            table.update(hooks | further)


def _elsewhere(
    hooks: Sequence[Callable[..., Any]], lock: threading.RLock, on_cpu: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook that runs `hooks` only in threads other than the current one, and only if `on_cpu` is set."""
    here = threading.get_ident()

    def run(gradient: torch.Tensor) -> torch.Tensor:
        # Only on the CPU does the thread show which backward pass runs a hook: on other devices, all hooks run in
        # autograd's threads.
        if on_cpu and threading.get_ident() != here:
            with lock:
                pass
            for hook in hooks:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
        return gradient

    return run
