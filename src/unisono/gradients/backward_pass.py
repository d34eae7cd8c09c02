"""The backward pass that runs: where it begins, and how it ends."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

__all__ = ["BackwardPass", "adds_to_leaves", "current_pass", "watch_outputs"]

_APPLY = BackwardCFunction.apply.__code__
_RUN = _engine_run_backward.__code__
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the graph task (one call of autograd's engine) that runs in this thread; -1 if none does."""


class BackwardPass:
    """The pass of one model: the outermost call of autograd in which a hooked parameter got a gradient.

    Calls that run inside it belong to it: those of re-entrant checkpointing, and those of users' hooks.

    Each graph task that is seen gets a token among its final callbacks. Torch drops it with the graph task, whether
    that has succeeded or raised, and the enclosing graph task is the current one again then, which gets a token in
    turn. The outermost one has none around it.

    Args:
        begin: Called before any gradient is accumulated.
        end: Called when the outermost call has succeeded; its error is raised by `backward()`.
        fail: Called when the outermost call, or `end`, has raised; before the caller sees the error. Also if the pass
            has not begun.
        one_thread: Whether all hooks run in the thread that called `backward()`, as on CPUs.

    Attributes:
        running: The graph task that was seen last; compare it with `current_pass()` before calling `enter`.
        is_open: Whether a pass has begun and not ended.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        end: Callable[[], None],
        fail: Callable[[], None],
        *,
        one_thread: bool,
    ) -> None:
        self._begin, self._end, self._fail, self._one_thread = begin, end, fail, one_thread
        self.forget()

    def forget(self) -> None:
        """Neither end the running pass nor undo it."""
        self.running: int | None = None
        self._reading = -1
        self.is_open = self._conflict = False
        self._thread: int | None = None
        self._tasks: dict[int, weakref.ref[Any]] = {}

    def follow(self, *_: object) -> None:
        """Note that a graph task runs, which may come to a parameter. A hook of the tensor that it came to."""
        number = current_pass()
        if number not in self._tasks:
            self._hold(number)

    def enter(self, number: int) -> None:
        """Note that the graph task of this number adds to gradients: in the pass, or as its first one."""
        if number != self.running:
            if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
                raise RuntimeError(
                    "compiled autograd does not tell hooks when a backward pass ends, so a GradientAverager cannot "
                    "average in it. Switch it off for backward(), which torch.compile does not need, or call "
                    "un.average_gradients(model, comm) after it instead of an averager"
                )
            if self.is_open and self._one_thread and self._thread != get_ident():
                self._conflict = True
                raise _two_threads()
            if number not in self._tasks:
                self._hold(number)
            if not self.is_open:
                self.is_open, self._thread = True, get_ident()
                self._begin()
        self.running = number

    def is_new(self) -> bool:
        """Whether the graph task that runs is another one than before, and adds to leaves' gradients.

        `torch.autograd.grad` only reads them.
        """
        number = current_pass()
        if number in (self.running, self._reading):
            return False
        if _will_run(torch._C._current_autograd_node()):
            return True
        self._reading = number
        return False

    def _hold(self, number: int) -> None:
        token = partial(self._completed, number)
        self._tasks[number] = weakref.ref(token, lambda _: self._dropped(number))
        _queue_callback(token)

    def _completed(self, number: int) -> None:
        """A graph task has succeeded."""
        if number not in self._tasks or _is_nested():
            return
        if self._conflict:
            raise _two_threads()
        if self.is_open:
            self._end()
        self.forget()

    def _dropped(self, number: int) -> None:
        """A graph task is over, and its pass is not."""
        self._tasks.pop(number, None)
        enclosing = current_pass()
        if enclosing < 0:
            self.forget()
            self._fail()
        elif enclosing not in self._tasks:
            self._hold(enclosing)


def watch_outputs(returned: Any, came: Callable[[torch.Tensor], None]) -> None:
    """Call `came` when a backward pass comes to what a model returned.

    Args:
        returned: A tensor, or a list, tuple, dict or dataclass of such.
        came: A hook of tensors.
    """
    parts: Iterable[Any] = ()
    if isinstance(returned, torch.Tensor):
        # A leaf has a hook of its own, and stays for many steps; what torch.func wraps is no part of a training step.
        if returned.grad_fn is not None and not torch._C._functorch.is_functorch_wrapped_tensor(returned):
            returned.register_hook(came)
    elif isinstance(returned, (list, tuple, dict)):
        parts = returned.values() if isinstance(returned, dict) else returned
    elif is_dataclass(returned) and not isinstance(returned, type):
        parts = [getattr(returned, field.name, None) for field in fields(returned)]
    for part in parts:
        watch_outputs(part, came)


def adds_to_leaves(parameters: frozenset[int]) -> bool:
    """Whether the backward pass that runs, in a hook of a tensor, adds to a leaf's gradient from there.

    `torch.autograd.grad` does not.

    Args:
        parameters: The `id` of each parameter; the other leaves are of interest if none of these depends on the tensor.
    """
    leaf = _leaf(torch._C._current_autograd_node(), parameters)
    return leaf is None or _will_run(leaf)


def _leaf(node: Any, parameters: frozenset[int]) -> Any:
    """A node that adds to a leaf's gradient: a parameter's, if the model's output depends on any."""
    seen, stack, found = {node}, [node], None
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or following in seen:
                continue
            leaf = getattr(following, "variable", None)
            if id(leaf) in parameters:
                return following
            found = found if leaf is None else following
            seen.add(following)
            stack.append(following)
    return found


def _will_run(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        # So torch says that a leaf's gradient was asked for by torch.autograd.grad.
        return False


def _is_nested() -> bool:
    """Whether the call of autograd that ends here runs inside another one: in a hook, or in a Function's backward."""
    runs = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _RUN:
            runs += 1
        elif frame.f_code is _APPLY and runs:
            # On a GPU the thread of the outer call has a stack of its own.
            return True
        frame = frame.f_back
    return runs > 1


def _two_threads() -> RuntimeError:
    return RuntimeError(
        "two threads run backward() on one averaged model: their gradients cannot be told apart. Run one backward() at "
        "a time"
    )
