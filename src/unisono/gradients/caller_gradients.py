"""The caller's state in a backward pass: p.grad from before the pass, and the effects of the caller's hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from unisono.core.garbage import weak_method

__all__ = ["CallerHooks", "SavedGradients"]

_post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
_version = attrgetter("_version")
_grad = attrgetter("grad")


@dataclass(slots=True)
class _Effects:
    """Effects of the caller's hooks in one pass.

    Attributes:
        versions: Version counters of the parameters when the pass began; None if the caller has no hooks.
        taken: Indices of the parameters whose p.grad was None after the caller's hooks ran.
    """

    versions: list[int] | None = None
    taken: set[int] = field(default_factory=set)


class CallerHooks:
    """The hooks that run after a gradient is added to p.grad: the caller's hooks and one averager's hooks.

    The caller's hooks see the same p.grad as without an averager: on parameters with such hooks, p.grad remains in
    place. Torch calls hooks in registration order, so whenever the caller adds a hook, the averager registers its own
    hooks again. That way, the averager's hooks run last, and see p.grad as the caller's hooks left it.

    Args:
        parameters: All parameters of the averager.
        spread: Indices of the parameters with sparse gradients.

    Attributes:
        count: Number of the caller's hooks.
        stays: Indices of the parameters whose p.grad remains in place during a pass.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], spread: Set[int]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        # Number of the averager's hooks on each parameter; all other hooks in torch's table are the caller's.
        self._own = Counter[int]()
        self.count: int = 0
        self._watched: set[int] = set()
        self.stays: set[int] = set(spread)
        self._effects = _Effects()
        self.begin()

    def begin(self) -> bool:
        """Begin a backward pass; return whether the caller has added or removed hooks since the last pass."""
        tables = map(_post_accumulate_hooks, self._parameters)
        count = sum(map(len, filter(None, tables))) - len(self._handles)
        changed = count != self.count
        if changed:
            self.count = count
            hooks = enumerate(map(_post_accumulate_hooks, self._parameters))
            self._watched = {index for index, table in hooks if table and len(table) > self._own[index]}
            # Indices are never removed: a parameter whose hook was removed merely costs one extra copy.
            self.stays |= self._watched
        # Save version counters: unlike p.grad, they reveal that a hook has run the optimizer.
        self._effects = _Effects(list(map(_version, self._parameters)) if count else None)
        return changed

    def clear(self) -> None:
        """Remove the averager's hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._own.clear()

    def add(self, index: int, after: Callable[..., object], *args: object) -> None:
        """Call a method when a gradient has been added to p.grad of a parameter that is not frozen.

        Args:
            index: Index of the parameter.
            after: The method, whose object the hook does not keep alive.
            args: The method's first arguments; the parameter follows.
        """
        self._own[index] += 1
        hook = partial(weak_method(after), *args)
        self._handles.append(self._parameters[index].register_post_accumulate_grad_hook(hook))

    def watch(self, index: int) -> None:
        """If the caller has hooks on a parameter, record whether they leave its gradient in p.grad."""
        if index in self._watched:
            self.add(index, self._look, index)

    def _look(self, index: int, parameter: torch.Tensor) -> None:
        # Torch also calls this hook for a parameter that was frozen after its forward pass, but adds no gradient to it.
        if parameter.grad is None and parameter.requires_grad:
            self._effects.taken.add(index)

    def used(self, lost: Iterable[int]) -> list[int]:
        """Return the indices of parameters whose gradients the caller's hooks used before averaging.

        Args:
            lost: Parameters whose gradient has arrived, but is neither in p.grad nor in a bucket.
        """
        used = sorted(self._effects.taken.union(lost))
        versions = self._effects.versions
        if not used and versions is not None:
            now = enumerate(map(_version, self._parameters))
            used = [index for index, version in now if version != versions[index]]
        return used


class SavedGradients:
    """Gradients from before a backward pass; created at its start and dropped at its end.

    During the pass, the earlier gradients are set aside and p.grad is None, so that new gradients arrive separately and
    nothing is copied. A gradient is copied only if the pass writes to its memory, or if p.grad must remain in place for
    the caller's hooks. Gradients of parameters that the pass does not reach, such as frozen parameters, are also set
    aside, and remain unchanged.

    Args:
        parameters: All parameters of the averager.
        held: Index and p.grad of each parameter that has a gradient.
        within: Indices of the parameters whose p.grad is in a bucket's memory.
        stays: Indices of the parameters that keep p.grad in place.

    Attributes:
        aside: Earlier gradients by parameter index, to be added to the gradients that the pass computes.
        owned: p.grad tensors that belong to the caller, by parameter index; the results are written into them.
        staying: Tensors left in p.grad, by parameter index. The pass may set p.grad to a different tensor.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        held: Sequence[tuple[int, torch.Tensor]],
        within: Set[int],
        stays: Set[int],
    ) -> None:
        self._parameters = parameters
        self.aside: dict[int, torch.Tensor] = {}
        self.owned: dict[int, torch.Tensor] = {}
        self.staying: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        for index, grad in held:
            # If p.grad has a graph or is sparse, leave it in place: torch itself must add the new gradient to it.
            plain = not grad.requires_grad and grad.layout == torch.strided
            copied = index in stays or not plain
            with torch.enable_grad():
                self._before[index] = grad.clone() if copied or index in within else grad
            if plain and index not in within:
                self.owned[index] = grad
            if copied:
                self.staying[index] = grad
            else:
                self.aside[index] = self._before[index]
        # Clear p.grad last: if a copy above runs out of memory, every p.grad is still unchanged.
        for index in self.aside:
            parameters[index].grad = None

    def arrived(self) -> set[int]:
        """Return the indices of parameters whose p.grad is set and is a different tensor than before the pass."""
        arrived: set[int] = set()
        for index, grad in enumerate(map(_grad, self._parameters)):
            if grad is not None and grad is not self.staying.get(index):
                arrived.add(index)
        return arrived

    def merge(self) -> None:
        """Add the gradients that were set aside back into p.grad."""
        for index, earlier in self.aside.items():
            new = self._parameters[index].grad
            with torch.set_grad_enabled(new is not None and new.requires_grad):
                total = earlier if new is None else earlier + new if new.requires_grad else earlier.add_(new)
            self._parameters[index].grad = total

    @torch.no_grad()
    def restore(self, indices: Iterable[int] | None = None) -> None:
        """Restore p.grad of these parameters, or of all parameters, to its value before the pass."""
        for index in range(len(self._parameters)) if indices is None else indices:
            before = self._before.get(index)
            owned = self.owned.get(index)
            if owned is not None and before is not None and owned is not before:
                # The pass has written to the caller's tensor, so copy the old values back.
                owned.copy_(before)
            self._parameters[index].grad = before if owned is None else owned
