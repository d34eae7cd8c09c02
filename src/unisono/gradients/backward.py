"""When a backward pass ends: the outermost one, also where checkpointing runs others inside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

__all__ = ["Backward", "current_pass", "watch_outputs"]

_APPLY = BackwardCFunction.apply.__code__
_RUN = _engine_run_backward.__code__
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""A number of the backward pass that is running in this thread; -1 if none is."""


class Backward:
    """Calls back once when the outermost backward pass ends that a gradient was seen in.

    A backward pass that runs inside a node of another one (re-entrant checkpointing) ends before the
    outer one does, and torch offers a callback only to the innermost. So the first gradient of an inner
    pass sets a hook on what the outer one does next.

    Args:
        finish: Called at the end; its error is raised by `backward()`.
        abandon: Called when a pass was broken off by an error: when the next one begins, or by `settle`.

    Attributes:
        running: The pass that was seen last; compare it with `current_pass()` before calling `enter`.
    """

    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish, self._abandon = finish, abandon
        self.running: int | None = None
        self._outermost: int | None = None
        self._handles: list[Any] = []

    def enter(self, number: int) -> None:
        """The running pass has this number; called when it is not the one that was seen last."""
        if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
            raise RuntimeError(
                "compiled autograd does not tell hooks when a backward pass ends, so a GradientAverager cannot average "
                "in it. Switch it off for backward(), which torch.compile does not need, or call "
                "un.average_gradients(model, comm) after it in place of an averager"
            )
        node = _outer_node()
        if node is not None:
            self.running = number
            if self._outermost is None:
                following = (after for after, _ in node.next_functions if after is not None)
                self._handles += [after.register_prehook(self._outside) for after in following]
            return
        if self._outermost is not None and self._outermost != number:
            if _runs_inside():
                # A hook of the user's runs a pass: what comes of it belongs to the one that goes on afterwards.
                self.running = number
                return
            self._abandon()
            self.forget()
        self.running = number
        if self._outermost is None:
            self._outermost = number
            _queue_callback(lambda: self._end(number))

    def _outside(self, gradients: Any) -> None:
        self.enter(current_pass())

    def _end(self, number: int) -> None:
        if self._outermost != number:
            return
        self.forget()
        self._finish()

    def settle(self) -> None:
        """Between passes: one that has not ended was broken off, and what it left is abandoned now."""
        if self._outermost is not None and current_pass() < 0:
            self._abandon()
            self.forget()

    def forget(self) -> None:
        """Let go of the pass that was seen last, and of its graph: it has ended, or was broken off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.running = self._outermost = None


def watch_outputs(model: torch.nn.Module, passing: Callable[[], None]) -> Any:
    """Call `passing` when a backward pass comes to what the model returned; a handle to end that."""
    return model.register_forward_hook(_Watch(passing, frozenset(id(p) for p in model.parameters())))


class _Watch:
    """A forward hook that does nothing on copies of the model, pickled ones too: they are not averaged."""

    def __init__(self, passing: Callable[[], None] | None = None, parameters: frozenset[int] = frozenset()) -> None:
        self._passing, self._parameters = passing, parameters

    def __call__(self, module: torch.nn.Module, given: Any, returned: Any) -> None:
        if self._passing is not None:
            self._watch(returned, self._passing)

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()

    def _watch(self, returned: Any, passing: Callable[[], None]) -> None:
        if isinstance(returned, torch.Tensor):
            self._watch_tensor(returned, passing)
        elif isinstance(returned, (list, tuple)):
            for part in returned:
                self._watch(part, passing)
        elif isinstance(returned, dict):
            self._watch(list(returned.values()), passing)
        elif is_dataclass(returned) and not isinstance(returned, type):
            self._watch([getattr(returned, field.name, None) for field in fields(returned)], passing)

    def _watch_tensor(self, returned: torch.Tensor, passing: Callable[[], None]) -> None:
        # A leaf has a hook of its own, and stays for many steps; what torch.func wraps is no part of a training step.
        if returned.grad_fn is None or torch._C._functorch.is_functorch_wrapped_tensor(returned):
            return
        leaf = None if torch.compiler.is_compiling() else self._leaf(returned.grad_fn)

        def reached(gradient: torch.Tensor) -> None:
            # torch.autograd.grad passes here too, but adds to no parameter's gradient.
            if leaf is None or _will_run(leaf):
                passing()

        returned.register_hook(reached)

    def _leaf(self, node: Any) -> Any:
        """A node that adds to a parameter's gradient, if the model's output depends on any."""
        seen, stack = {node}, [node]
        while stack:
            for following, _ in stack.pop().next_functions:
                if following is None or following in seen:
                    continue
                if id(getattr(following, "variable", None)) in self._parameters:
                    return following
                seen.add(following)
                stack.append(following)
        return None


def _will_run(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        # So torch says that a leaf's gradient was asked for by torch.autograd.grad.
        return False


def _runs_inside() -> bool:
    """Whether this thread is in the middle of a backward pass that another one runs in."""
    return sum(frame.f_code is _RUN for frame in _frames()) > 1


def _outer_node() -> Any:
    """The node that the outermost backward pass of this thread is in the middle of, if it is in Python."""
    # In each step's first hook: a loop over a generator would take three times as long.
    node = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            node = frame.f_locals["self"]
        frame = frame.f_back
    return node


def _frames() -> Iterator[FrameType]:
    """Of this thread, from the innermost."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
