"""Tracks the running backward pass: when it begins, and how it ends."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch._C import _current_autograd_node, _current_graph_task_id, _will_engine_execute_node
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from unisono.core.tensors import is_transformed
from unisono.utils.pass_watch import PassWatch

__all__ = ["BackwardTracker", "PassOwner", "adds_to_leaves", "current_pass", "watch_outputs", "will_run"]

_APPLY = BackwardCFunction.apply.__code__
_RUN = _engine_run_backward.__code__
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

_created = itertools.count()
_tokens: dict[int, weakref.ref[partial[None]]] = {}
"""Token of each running graph task that a tracker has seen, by number; its argument is the list of trackers."""

current_pass: Callable[[], int] = _current_graph_task_id
"""Number of the graph task (one call of autograd's engine) that runs in this thread; -1 if none does."""

_current_node: Callable[[], Any] = _current_autograd_node
"""Node of the graph that runs in this thread."""


_in_order = attrgetter("owner.waits", "number")


def _end_passes(trackers: list[BackwardTracker]) -> None:
    """End the passes of all models that a graph task has reached, in the order in which their trackers were created.

    That order is the same on all ranks. The order of their gradients follows the graph, and differs if ranks add up a
    loss in different orders. Ending a pass may block until all other ranks end theirs, so ranks that used that order
    could block forever.

    Models whose forwards communicate come first. If another rank has failed in this pass, it repeats such a forward
    before anything else, so no rank may wait for the repeat in another model: these models raise. If they do not, all
    ranks have reached the end of this pass, and any other broken model has been broken since an earlier pass.

    Models that wait for the repeat of a pass that failed on another rank come last. The repeat first renews models that
    do not wait, so a rank that does not yet know that one of these has failed would block the repeating rank forever.
    """
    if _is_nested():
        return
    ordered = sorted(trackers, key=_in_order)
    begun = [tracker for tracker in ordered if tracker.is_open]
    is_broken = any(tracker.owner.is_broken() for tracker in begun)
    for tracker in begun:
        if tracker.owner.gathers:
            tracker.complete()
    if is_broken:
        # Renew all models before any of them communicates. Another rank may not know yet that one of them is broken,
        # and wait at the end of one that is not broken: renewing that one as well ends the wait, and the rank repeats
        # its pass.
        for tracker in begun:
            tracker.owner.renew()
    for tracker in ordered:
        tracker.complete()


class PassOwner:
    """Base class for owners of a `BackwardTracker`: one model whose gradients are averaged in its backward passes."""

    gathers = False
    """Whether the model's forwards communicate, so that a pass cannot join the repeat of another rank's."""
    waits = False
    """Whether `end` waits until a rank whose pass has failed repeats it, instead of raising."""

    def begin(self) -> None:
        """Begin a pass, before any gradient is accumulated."""
        raise NotImplementedError

    def end(self) -> None:
        """End the pass after the outermost call has succeeded. `backward()` raises any error from this."""
        raise NotImplementedError

    def fail(self) -> None:
        """Undo the pass, because the outermost call, or `end`, has raised; the caller sees the error next.

        Also called for an autograd call that raised before reaching a parameter, in which case no pass had begun.
        """
        raise NotImplementedError

    def is_broken(self) -> bool:
        """Return whether the model cannot communicate because an earlier pass has failed."""
        return False

    def renew(self) -> None:
        """Repair the communication. Called before any `end` in a pass if one of its models is broken. Collective."""


class BackwardTracker:
    """Tracks the pass of one model: the outermost autograd call in which a hooked parameter received a gradient.

    Nested calls, by re-entrant checkpointing or users' hooks, belong to it.

    Each graph task gets a token among its final callbacks, shared by all trackers. Torch drops it with the graph task,
    whether that has succeeded or raised. Then the enclosing graph task is current again, and gets a token in turn,
    until the outermost one, which is not enclosed.

    The first tracker that sees a graph task enlists those of all other models of the communicator whose parameters are
    in its graph. If the task raises before it reaches one of these, other ranks may already be waiting in that model,
    so its owner also has to fail.

    Args:
        owner: The model, which is notified of each pass.
        parameters: Its trained parameters.
        watch: Started and stopped with each pass.

    Attributes:
        owner: As passed.
        number: Position in the order in which trackers were created.
        running: The latest graph task.
        is_open: Whether a pass has begun but not ended.
        arrived: Indices of the leaves to whose gradient the pass has added, or is about to.
    """

    def __init__(self, owner: PassOwner, parameters: Sequence[torch.Tensor], watch: PassWatch) -> None:
        self.owner = owner
        self._parameters = parameters
        # On CPUs, all hooks run in the thread that called `backward()`.
        self._one_thread = all(p.is_cpu for p in parameters)
        self._watch = watch
        watch.on_pass = self._enlist
        self.number: int = next(_created)
        self.forget()

    def forget(self) -> None:
        """Drop the running pass without ending or undoing it."""
        self._watch.stop()
        self.running: int | None = None
        self._reading: int | None = None
        self.is_open: bool = False
        self._conflict = False
        self.arrived: set[int] = set()
        self._thread: int | None = None
        self._tasks: dict[int, weakref.ref[Any]] = {}

    def follow(self, *_: object) -> None:
        """Hook on the tensor that a graph task has reached: record that the task may reach a parameter."""
        number = current_pass()
        if number not in self._tasks:
            self._hold(number)

    def arrive(self, index: int, gradient: torch.Tensor) -> None:
        """Hook on a leaf: its gradient is about to be accumulated, or returned by `torch.autograd.grad`."""
        number = current_pass()
        # Torch calls it for each parameter in each pass.
        if number != self.running:
            if number == self._reading:
                return
            compiled = getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)
            # Compiled autograd, which has no node here, is refused.
            if number >= 0 and not compiled and not will_run(_current_node()):
                self._reading = number
                return
            self.enter(number)
        self.arrived.add(index)

    def enter(self, number: int) -> None:
        """Record that this graph task adds to gradients, as part of the pass, or as its first task."""
        if number != self.running:
            if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
                raise RuntimeError(
                    "compiled autograd calls no hook at the end of a backward pass, so gradients cannot be "
                    "averaged in it. Disable it for backward() (torch.compile does not need it), or call "
                    "un.average_gradients(model, comm) after backward() instead"
                )
            if self.is_open and self._one_thread and self._thread != get_ident():
                self._conflict = True
                raise _two_threads()
            if number not in self._tasks:
                self._hold(number)
            if not self.is_open:
                self.is_open = True
                self._thread = get_ident()
                self._watch.start()
                self.owner.begin()
        self.running = number

    def _hold(self, number: int) -> None:
        known = _tokens.get(number)
        token = None if known is None else known()
        is_new = token is None
        if token is None:
            # Not an object with a method, whose frame would be in an error's traceback and keep the token alive.
            token = partial(_end_passes, [])
            _tokens[number] = weakref.ref(token, lambda _: _tokens.pop(number, None))
            _queue_callback(token)
        token.args[0].append(self)
        self._tasks[number] = weakref.ref(token, lambda _: self.abandon(number))
        if is_new:
            self._watch.announce(number)

    def _enlist(self, number: int) -> None:
        """Follow the running graph task, which has reached another model, if it will add to a parameter's gradient."""
        if number not in self._tasks and any(map(_is_ahead, self._parameters)):
            self._hold(number)

    def complete(self) -> None:
        """End the pass, because the outermost graph task has succeeded."""
        if self._conflict:
            raise _two_threads()
        if self.is_open:
            self.owner.end()
        self.forget()

    def abandon(self, number: int) -> None:
        """Handle the end of a graph task whose pass has not ended: undo the pass, unless another task encloses it."""
        self._tasks.pop(number, None)
        enclosing = current_pass()
        if enclosing < 0:
            self.forget()
            self.owner.fail()
        elif enclosing not in self._tasks:
            self._hold(enclosing)


def will_run(leaf: Any) -> bool:
    """Return whether the running graph task adds to a leaf's gradient; `torch.autograd.grad` does not."""
    try:
        return _will_engine_execute_node(leaf)
    except RuntimeError:
        # Torch raises this if torch.autograd.grad requested a leaf's gradient.
        return False


def _is_ahead(parameter: torch.Tensor) -> bool:
    """Return whether the running graph task adds to a parameter's gradient."""
    if not parameter.requires_grad:
        return False
    # Torch gives access to a leaf's node only through a view. The class of a freed parameter refuses any use.
    with torch.enable_grad(), torch.DisableTorchFunctionSubclass():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return will_run(view.grad_fn.next_functions[0][0])


def _is_nested() -> bool:
    """Return whether the autograd call that ends here is nested: in a hook, or in a Function's backward."""
    runs = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _RUN:
            runs += 1
        elif frame.f_code is _APPLY and runs:
            # On a GPU, the outer call's thread has a separate stack.
            return True
        frame = frame.f_back
    return runs > 1


def _two_threads() -> RuntimeError:
    return RuntimeError(
        "two threads run backward() on one model, which mixes their gradients. Run one backward() at a time"
    )


def watch_outputs(returned: Any, arrived: Callable[[torch.Tensor], None]) -> int:
    """Call `arrived` when a backward pass reaches an output of a model. Return the number of watched tensors.

    Args:
        returned: A tensor, or a list, tuple, dict or dataclass of tensors.
        arrived: A tensor hook.
    """
    parts: Iterable[Any] = ()
    if isinstance(returned, torch.Tensor):
        # A leaf has its own hook, and lives for many steps; tensors wrapped by torch.func are not part of a training
        # step.
        if returned.grad_fn is not None and not is_transformed(returned):
            returned.register_hook(arrived)
            return 1
    elif isinstance(returned, (list, tuple, dict)):
        parts = returned.values() if isinstance(returned, dict) else returned
    elif is_dataclass(returned) and not isinstance(returned, type):
        parts = [getattr(returned, field.name, None) for field in fields(returned)]
    return sum(watch_outputs(part, arrived) for part in parts)


def adds_to_leaves(parameters: frozenset[int]) -> bool:
    """Return whether the backward pass that runs a tensor's hook adds to the gradient of a leaf that it depends on.

    `torch.autograd.grad` does not.

    Args:
        parameters: `id`s of the parameters; other leaves count only if the tensor depends on no parameter.
    """
    leaf = _leaf(_current_node(), parameters)
    return leaf is None or will_run(leaf)


def _leaf(node: Any, parameters: frozenset[int]) -> Any:
    """Return a node that adds to a leaf's gradient: a parameter's, if the model's output depends on any."""
    seen = {node}
    stack = [node]
    found = None
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
