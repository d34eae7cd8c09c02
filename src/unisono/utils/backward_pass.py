"""Tracks when a backward pass begins and how it ends."""

from __future__ import annotations

import itertools
import sys
import weakref
from abc import ABC, abstractmethod
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

from unisono.core.failure import text_of
from unisono.core.tensors import is_transformed
from unisono.utils.pass_watch import PassWatch

__all__ = ["BackwardTracker", "PassOwner", "adds_to_leaves", "current_pass", "watch_outputs", "will_run"]

_APPLY = BackwardCFunction.apply.__code__
_RUN = _engine_run_backward.__code__
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

_created = itertools.count()
_tokens: dict[int, weakref.ref[partial[None]]] = {}
"""Tokens of the running graph tasks that trackers have seen, by task number. A token's argument lists the trackers."""

current_pass: Callable[[], int] = _current_graph_task_id
"""Number of the graph task (one call of autograd's engine) that runs in this thread; -1 if there is none."""

_current_node: Callable[[], Any] = _current_autograd_node
"""The autograd graph node that is running in this thread."""


_in_order = attrgetter("owner.waits", "number")
_is_open = attrgetter("is_open")
_is_broken = attrgetter("owner.is_broken")


def _end_passes(trackers: list[BackwardTracker]) -> None:
    """End the backward passes of all models that a graph task has reached, in the order in which trackers were created.

    All ranks create their trackers in the same order. The order in which gradients arrive depends on the graph, and
    differs if ranks add up a loss in different orders. Ending a model's backward pass may block until all other ranks
    also end it, so ranks could deadlock if they ended passes in the order of the gradients.

    Models whose forward passes communicate come first. A rank that has failed in this backward pass first repeats the
    forward pass of such a model, and waits there for the other ranks. These must join it there instead of waiting in
    another model, so ending such a model raises an error if a rank has failed. If none of these models raises an error,
    all ranks have reached the end of this backward pass. If another model is broken nevertheless, an earlier backward
    pass has broken it.

    Models whose `end` waits for another rank to repeat its failed backward pass (`PassOwner.waits`) come last. A rank
    that repeats its backward pass first calls `renew`, which is collective, on models whose `end` does not wait. Both
    ranks would block forever if another rank that is unaware of the failure first ended a model whose `end` waits.
    """
    if _is_nested():
        return
    ordered = sorted(trackers, key=_in_order)
    begun = list(filter(_is_open, ordered))
    is_broken = any(map(_is_broken, begun))
    for tracker in begun:
        if tracker.owner.gathers:
            tracker.complete()
    if is_broken:
        # Renew all models, including unbroken ones, before completing the remaining passes: a rank that does not know
        # of the failure may be waiting in an unbroken model. Renewing an unbroken model interrupts the ranks that wait
        # in it, so that they repeat their backward passes.
        for tracker in begun:
            tracker.owner.renew()
    for tracker in ordered:
        tracker.complete()


class PassOwner(ABC):
    """Base class for objects that average one model's gradients during backward passes, and own a `BackwardTracker`."""

    gathers = False
    """Whether the model's forward passes communicate. If so, a backward pass cannot join another rank's repetition."""
    waits = False
    """Whether `end` waits for a rank to repeat its failed backward pass, instead of raising an error."""
    is_broken = False
    """Whether the model cannot communicate because an earlier backward pass has failed."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a backward pass, before any gradient is accumulated."""

    @abstractmethod
    def end(self) -> None:
        """End the backward pass after the outermost autograd call has succeeded. Errors propagate to `backward()`."""

    @abstractmethod
    def fail(self) -> None:
        """Undo the backward pass, because the outermost autograd call or `end` has raised an error.

        `fail` is also called if an autograd call raised an error before it reached a parameter, and thus before a
        backward pass began.
        """

    def renew(self) -> None:
        """Restore communication. Collective. Called for all models of a backward pass if one of these models is broken.

        The models whose forward passes communicate run `end` before any `renew`, and the other models run `end`
        afterwards.
        """


class BackwardTracker:
    """Tracks one model's backward pass: the outermost autograd call in which a hooked parameter received a gradient.

    Nested calls, made by re-entrant checkpointing or users' hooks, belong to the same backward pass.

    Each graph task gets a token, which is one of the task's final callbacks and is shared by all trackers. Torch drops
    the token with the graph task, whether the task has succeeded or failed. If the task was nested, the enclosing graph
    task is then current again and gets its own token, and so on up to the outermost task.

    The first tracker that sees a graph task announces the task to the trackers of the communicator's other models. A
    notified tracker also tracks the task if its model's parameters are in the task's graph. If the task fails before it
    reaches one of these models, other ranks may already be waiting in that model, so the model's owner must also fail.

    Args:
        owner: The model's owner, which is notified of each backward pass.
        parameters: The model's trained parameters.
        watch: The model's `PassWatch`, which is started and stopped with each backward pass.

    Attributes:
        owner: The argument `owner`.
        number: Position in the order in which trackers were created.
        cause: Class and text of the error that made the backward pass fail, if the owner raised it. Empty if one of the
            program's hooks or Functions raised it, because torch propagates such errors only after `fail`.
        running: Number of the latest graph task that adds to the model's gradients.
        is_open: Whether a backward pass has begun but not ended.
        arrived: Indices of the leaves whose gradients the backward pass has accumulated or is about to accumulate.
    """

    def __init__(self, owner: PassOwner, parameters: Sequence[torch.Tensor], watch: PassWatch) -> None:
        self.owner = owner
        self._parameters = parameters
        # On CPUs, all hooks run in the thread that called `backward()`, so a hook in another thread belongs to a second
        # call.
        self._one_thread = all(p.is_cpu for p in parameters)
        self._watch = watch
        watch.on_pass = self._enlist
        self.number: int = next(_created)
        self.cause: str = ""
        self.forget()

    def forget(self) -> None:
        """Drop the running backward pass without ending or undoing it."""
        self._watch.stop()
        self.running: int | None = None
        self._reading: int | None = None
        self.is_open: bool = False
        self._conflict = False
        self.arrived: set[int] = set()
        self._thread: int | None = None
        self._tasks: dict[int, weakref.ref[Any]] = {}

    def follow(self, *_: object) -> None:
        """Tensor hook: record that the running graph task may reach a parameter."""
        number = current_pass()
        if number not in self._tasks:
            self._hold(number)

    def arrive(self, index: int, gradient: torch.Tensor) -> None:
        """Leaf hook: the leaf's gradient is about to be accumulated, or to be returned by `torch.autograd.grad`."""
        number = current_pass()
        # Test the common case first: torch calls this hook for each parameter in each backward pass.
        if number != self.running:
            if number == self._reading:
                return
            compiled = getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)
            # Skip this test in compiled autograd, which has no current node; `enter` rejects it.
            if number >= 0 and not compiled and not will_run(_current_node()):
                self._reading = number
                return
            self.enter(number)
        self.arrived.add(index)

    def enter(self, number: int) -> None:
        """Record that a graph task adds to gradients. The first such task begins the backward pass."""
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
                try:
                    self.owner.begin()
                except Exception as error:
                    self.failed(error)
                    raise
        self.running = number

    def _hold(self, number: int) -> None:
        known = _tokens.get(number)
        token = None if known is None else known()
        is_new = token is None
        if token is None:
            # Use a partial, not a bound method: a method's frame in an error's traceback would keep the token alive.
            token = partial(_end_passes, [])
            _tokens[number] = weakref.ref(token, partial(_tokens.pop, number))
            _queue_callback(token)
        token.args[0].append(self)
        self._tasks[number] = weakref.ref(token, lambda _: self.abandon(number))
        if is_new:
            self._watch.announce(number)

    def _enlist(self, number: int) -> None:
        """Track a graph task that reached another model first, if the task will also add to this model's gradients."""
        if number not in self._tasks and any(map(_is_ahead, self._parameters)):
            self._hold(number)

    def complete(self) -> None:
        """End the backward pass, because the outermost graph task has succeeded."""
        if self._conflict:
            raise _two_threads()
        if self.is_open:
            try:
                self.owner.end()
            except Exception as error:
                self.failed(error)
                raise
        self.forget()

    def failed(self, error: Exception) -> Exception:
        """Record the text of the owner's error in `cause`, so that other ranks can quote it; return the error."""
        # Keep only the text, because the error's traceback refers to frames, which could keep the graph task's token
        # alive.
        self.cause = f"{type(error).__name__}: {text_of(error)}"
        return error

    def abandon(self, number: int) -> None:
        """Handle the end of a graph task: undo the unfinished backward pass, unless another task encloses this one."""
        self._tasks.pop(number, None)
        enclosing = current_pass()
        if enclosing < 0:
            self.forget()
            self._watch.raised()
            self.owner.fail()
            self.cause = ""
        elif enclosing not in self._tasks:
            self._hold(enclosing)


def will_run(leaf: Any) -> bool:
    """Return whether the running graph task adds to a leaf's gradient; False for `torch.autograd.grad`."""
    try:
        return _will_engine_execute_node(leaf)
    except RuntimeError:
        # Torch raises a RuntimeError if `torch.autograd.grad` requested the gradient of a leaf.
        return False


def _is_ahead(parameter: torch.Tensor) -> bool:
    """Return whether the running graph task will add to a parameter's gradient."""
    if not parameter.requires_grad:
        return False
    # A leaf's graph node is only accessible through a view. Bypass `__torch_function__`, because the class of a freed
    # parameter raises an error on any use.
    with torch.enable_grad(), torch.DisableTorchFunctionSubclass():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return will_run(view.grad_fn.next_functions[0][0])


def _is_nested() -> bool:
    """Return whether the autograd call that is ending is nested in a hook or in a Function's backward."""
    runs = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _RUN:
            runs += 1
        elif frame.f_code is _APPLY and runs:
            # With a GPU, the outer autograd call runs in another thread, so this stack shows only the Function's
            # backward.
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
        # Skip leaves, because they have their own hooks and live for many training steps. Also skip tensors wrapped by
        # torch.func, because they are not part of a training step.
        if returned.grad_fn is not None and not is_transformed(returned):
            returned.register_hook(arrived)
            return 1
    elif isinstance(returned, (list, tuple, dict)):
        parts = returned.values() if isinstance(returned, dict) else returned
    elif is_dataclass(returned) and not isinstance(returned, type):
        parts = [getattr(returned, field.name, None) for field in fields(returned)]
    return sum(watch_outputs(part, arrived) for part in parts)


def adds_to_leaves(parameters: frozenset[int]) -> bool:
    """In a tensor hook, return whether the backward pass adds to the gradient of a leaf on which the tensor depends.

    False for `torch.autograd.grad`.

    Args:
        parameters: `id`s of the parameters. Other leaves are considered only if the tensor depends on no parameter.
    """
    leaf = _leaf(_current_node(), parameters)
    return leaf is None or will_run(leaf)


def _leaf(node: Any, parameters: frozenset[int]) -> Any:
    """Return the graph node of a leaf on which `node` depends; if possible, this leaf is a parameter."""
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
