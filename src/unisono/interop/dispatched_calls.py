"""Intercepts process-group calls in torch's dispatcher, where torch's own tools can see the calls.

All callers of a C++ group, such as `dist.all_reduce`, DDP's reducer or a functional collective, call an operator such
as `c10d::allreduce_`. Our kernel is registered for the dispatch key `BackendSelect`, which comes after autograd, modes
and FakeTensor but before the kernels of all devices. Our kernel receives each call with all its arguments, and forwards
the call.

A Python group is called directly, which is faster, but torch's tools do not see the call. A call that torch's tools
must see is made on a C++ group without a backend; the C++ group calls the operator, and our kernel then calls the
Python group. Programs may also call operators themselves, as graphs traced by torch do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from unisono.errors import UnavailableError

__all__ = ["CALLS", "Operator", "first_tensor", "pass_on", "result_of", "take_calls", "watch_with"]

_KEY = torch._C.DispatchKey.BackendSelect
_PLAIN = ("output_split_sizes", "input_split_sizes", "dst", "src", "tag")
"""Arguments after the group that methods take as separate arguments, not in their options object."""
_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
"""Methods that take a reduce operation."""


def first_tensor(arguments: Sequence[object]) -> torch.Tensor | None:
    """Return the first tensor among arguments, including those in lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, list) and (found := first_tensor(argument)) is not None:
            return found
    return None


class _Calls(threading.local):
    """Per-thread state of the calls in progress.

    Attributes:
        making: Whether this thread is inside `make`, so that the operator must not be called again.
        kind: Reduce operation that the Python caller passed, for versions of torch whose operators hide it.
    """

    def __init__(self) -> None:
        self.making = False
        self.kind: Any = None
        self._works: list[list[Any]] = []

    @contextmanager
    def kept(self) -> Iterator[list[Any]]:
        """Yield a list of the `Work`s created in the block.

        The list keeps these objects alive, because C++ returns a `Work` as the same Python object only while Python
        refers to that object.
        """
        works: list[Any] = []
        self._works.append(works)
        try:
            yield works
        finally:
            self._works.pop()

    def make(self, group: Any, name: str, args: Sequence[Any]) -> Any:
        """Call a method of one of our groups on behalf of an operator, so that the operator is not called again."""
        self.making = True
        try:
            work = getattr(group, name)(*args)
        finally:
            self.making = False
        if self._works:
            self._works[-1].append(work)
        return work


CALLS = _Calls()


class Operator:
    """A torch operator and the positions of its arguments. The last few arguments depend on the version of torch.

    Attributes:
        name: Name without the namespace.
        places: Position of each argument, by name.
        group: Position of the process group.
    """

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        self.name: str = schema.name.partition("::")[2]
        self.places: dict[str, int] = {argument.name: place for place, argument in enumerate(schema.arguments)}
        self.group: int = self.places["process_group"]
        self.redispatch: Callable[..., Any] = overload.redispatch
        self._asynchronous = self.places.get("async_op", self.places.get("asyncOp", len(self.places)))
        self._returns = len(schema.returns)
        self._method = {"recv_any_source_": "recv_anysource"}.get(self.name, self.name.removesuffix("_"))

    def value(self, args: Sequence[Any], name: str, default: Any = None) -> Any:
        """Return an argument by name, or `default`: torch omits trailing arguments that have their default value."""
        place = self.places.get(name, len(args))
        return args[place] if place < len(args) else default

    def asynchronous(self, args: Sequence[Any]) -> bool:
        """Return whether the caller waits for the result later."""
        return self._asynchronous >= len(args) or bool(args[self._asynchronous])

    def kind(self, args: Sequence[Any]) -> Any:
        """Return the reduce operation, or None if the call has none or this version of torch hides it."""
        boxed = self.value(args, "reduce_op")
        if boxed is None or _HIDDEN:
            return CALLS.kind
        return dist.ReduceOp.RedOpType(boxed.op())

    def made(self, call: Callable[[str, Sequence[Any]], Any], args: Sequence[Any]) -> Any:
        """Run the operator as a method of one of our groups; `call` takes the method's name and arguments.

        Returns: What the operator returns.

        Raises `UnavailableError` if a program called the operator itself and this version of torch hides the reduce
        operation.
        """
        limit = timedelta(milliseconds=self.value(args, "timeout", -1))
        if self.name == "monitored_barrier_":
            call("monitored_barrier", (limit, self.value(args, "wait_all_ranks")))
            return None
        kind = self.kind(args)
        if kind is None and "reduce_op" in self.places:
            raise UnavailableError(
                f"torch {torch.__version__} hides the reduce operation of torch.ops.c10d.{self.name} from backend "
                f"'unisono'; call torch.distributed's function, or use a later version"
            )
        given = [args[self.places[name]] for name in _PLAIN if name in self.places]
        if "tag" not in self.places:
            options = SimpleNamespace(
                asyncOp=self.asynchronous(args),
                reduceOp=kind,
                rootRank=self.value(args, "root_rank"),
                timeout=limit,
                device=args[0].device if self.name == "barrier" else None,
            )
            given.append(options)
        # Like our methods, every operator takes its tensors first; the group follows. Only the barrier operator has a
        # tensor argument that our method lacks.
        tensors = () if self.name == "barrier" else args[: self.group]
        boxed = call(self._method, [*tensors, *given]).boxed()
        return boxed if self._returns == 1 else (args[0], boxed)


_HIDDEN = not hasattr(torch.classes.c10d.ReduceOp(), "op")
"""Whether this version of torch hides an operator's reduce operation from Python."""

_Seen = Callable[[Operator, Any, Callable[[], Any], tuple[Any, ...]], Any]
_seen: _Seen | None = None
# Our groups. The key is the `id` of the group that operators are called on: our group itself, or a C++ group with the
# same lifetime.
_groups: WeakValueDictionary[int, Any] = WeakValueDictionary()
# Keep the library object alive: garbage-collecting it would undo its registrations.
_libraries: list[torch.library.Library] = []
_lock = threading.Lock()


def take_calls(called: dist.ProcessGroup, group: Any) -> None:
    """Forward all later operator calls on a process group to one of our groups. Idempotent.

    Args:
        called: The group that operators are called on: our group, or a C++ group that only our group refers to.
        group: Our group.
    """
    _groups[id(called)] = group
    _install()


def pass_on(called: dist.ProcessGroup) -> None:
    """Undo `take_calls` for a C++ group, so that its own backend handles its calls again."""
    del _groups[id(called)]


def _install() -> None:
    """Put our kernels in front of torch's for the rest of the process. Idempotent.

    Call `_install` only when our kernels are needed: they add a few microseconds to each call on a C++ group.
    """
    with _lock:
        if _libraries:
            return
        library = torch.library.Library("c10d", "IMPL")
        for name in torch._C._dispatch_get_all_op_names():
            space, _, rest = name.partition("::")
            overload = getattr(torch.ops.c10d, rest).default if space == "c10d" else None
            if overload is not None and any(part.name == "process_group" for part in overload._schema.arguments):
                library.impl(rest, _kernel(Operator(overload)), "BackendSelect", with_keyset=True)
        _libraries.append(library)
        for name in _METHODS if _HIDDEN else ():
            if method := getattr(dist.ProcessGroup, name, None):
                setattr(dist.ProcessGroup, name, _noting_kind(method))


def watch_with(seen: _Seen) -> None:
    """Pass all later calls on C++ groups to a function.

    Args:
        seen: Function that takes the operator, the group, a function that makes the call, and the arguments, and
            returns the call's result.
    """
    global _seen  # noqa: PLW0603
    _seen = seen
    _install()


def _kernel(operator: Operator) -> Callable[..., Any]:
    unbox = dist.ProcessGroup.unbox

    def kernel(keyset: Any, *args: Any) -> Any:
        def passed_on() -> Any:
            return operator.redispatch(keyset.remove(_KEY), *args)

        called: Any = unbox(args[operator.group])
        group = _groups.get(id(called))
        if group is None:
            return passed_on() if _seen is None else _seen(operator, called, passed_on, args)
        first = first_tensor(args)
        if first is not None and first.is_meta:
            # Meta tensors have no elements, so pass the call to torch's kernels, which do nothing. FakeTensorMode
            # converts its tensors to meta tensors.
            return passed_on()
        if called is group:
            return operator.made(lambda name, own: getattr(group, name)(*own), args)
        return operator.made(partial(CALLS.make, group), args)

    return kernel


def _noting_kind(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(*args: Any, **keywords: Any) -> Any:
        # Search from the end, because torch's own functions pass the options object last.
        given = (*args, *keywords.values())[::-1]
        options = next((each for each in given if hasattr(each, "reduceOp") or isinstance(each, _OPS)), None)
        op = getattr(options, "reduceOp", options)
        CALLS.kind = getattr(op, "op", op) or dist.ReduceOp.SUM
        try:
            return method(*args, **keywords)
        finally:
            CALLS.kind = None

    return noted


_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


def result_of(made: Any) -> dist.Work | None:
    """Return the `Work` contained in an operator's results, or None."""
    boxed = made[-1] if isinstance(made, tuple) else made
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None
