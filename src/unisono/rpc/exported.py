"""Functions that other ranks may call: exposed functions, or any importable function if peers are trusted."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from unisono.errors import CommError

__all__ = ["ExportTable", "NotExposedError", "async_execution", "expose", "is_async", "name_of"]

T = TypeVar("T")

# A script's module is called `__main__` in the script itself, and `__mp_main__` in processes that multiprocessing
# starts from it.
_MAIN = ("__main__", "__mp_main__")
_MARK = "__unisono_exposed__"
_ASYNC = "__unisono_async__"
_NAMES_KEPT = 4096

_names: dict[Any, str] = {}
"""Cache of names: each call needs the function's name, and finding it is the slowest part of a call."""


_exposed: dict[str, Any] = {}
"""Functions and classes exposed in this process, by name.

Global, because `expose` decorates functions when their module is imported, before there is any agent.
"""


class NotExposedError(CommError, PermissionError):
    """Raised if a called function, or a function among its arguments, is not exposed on the called rank. Nothing ran.

    Args:
        message, group, call, rank, size, operation, peer, nbytes, waited_s: As for `CommError`.

    Example:
        >>> def program(comm):
        ...     un.rpc.init(comm)
        ...     try:
        ...         un.rpc.rpc_sync(0, torch.add)
        ...     except un.rpc.NotExposedError:
        ...         return "refused"
        ...     finally:
        ...         un.rpc.shutdown()
        >>> un.launch(program, 1, "thread")
        ['refused']
    """


class _Mark:
    """Exposes a function wherever it is received by value, such as in ranks that `launch` starts from a notebook."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target
        _exposed[name] = target

    def __reduce__(self) -> Any:
        return _Mark, (self.name, self.target)


def expose(target: T) -> T:
    """Allow other ranks to call a function, or to create objects of a class and call their public methods.

    `expose` can be used as a decorator. Any peer that can reach the agent can call the function with any arguments, so
    expose only functions that are harmless to call.

    Exposed names are stored in one table per process, which ranks that run as threads share. If each rank creates its
    own function, such as a closure over its rank, pass the function to `init(expose=[...])` instead, which exposes it
    on that rank only.

    Args:
        target: A function or class.

    Returns: `target` itself.

    Raises:
        TypeError: The target is not callable, or has no name under which peers could request it.

    Example:
        >>> @un.rpc.expose
        ... def double(x):
        ...     return 2 * x
        >>> def program(comm):
        ...     un.rpc.init(comm)
        ...     answer = un.rpc.rpc_sync(1 - comm.rank, double, args=(comm.rank,))
        ...     un.rpc.shutdown()
        ...     return answer
        >>> un.launch(program, 2, "thread")
        [0, 2]
    """
    if not callable(target):
        raise TypeError(f"only functions and classes can be exposed, not a {type(target).__name__}")
    name = name_of(target)
    mark = _Mark(name, target)
    # Functions written in C reject the attribute, but `_Mark` has already added their name to the table of exposed
    # functions.
    with contextlib.suppress(AttributeError, TypeError):
        setattr(target, _MARK, mark)
    return target


def async_execution(function: T) -> T:
    """Mark an exposed function that returns a `torch.futures.Future`: the reply is sent when the future completes.

    Until the future completes, the thread that ran the function can serve other calls. Use `async_execution` as a
    decorator below `expose`.

    Args:
        function: A function, static method or class method.

    Returns: The same function.

    Example:
        >>> @un.rpc.expose
        ... @un.rpc.async_execution
        ... def later():
        ...     future = torch.futures.Future()
        ...     future.set_result(7)
        ...     return future
        >>> def program(comm):
        ...     un.rpc.init(comm)
        ...     answer = un.rpc.rpc_sync(0, later)
        ...     un.rpc.shutdown()
        ...     return answer
        >>> un.launch(program, 1, "thread")
        [7]
    """
    inner = function.__func__ if isinstance(function, staticmethod | classmethod) else function
    setattr(inner, _ASYNC, True)
    return function


def is_async(function: Any) -> bool:
    """Return whether a function is marked with `async_execution`."""
    return bool(getattr(function, _ASYNC, False))


def name_of(target: Any) -> str:
    """Return the name by which other ranks can request a function or class: its module and qualified name.

    Example:
        >>> name_of(torch.add), name_of(dict)
        ('torch:add', 'builtins:dict')
    """
    try:
        known = _names.get(target)
    except TypeError:
        known = None
    if known is not None:
        return known
    name = _find_name(target)
    if "<" in name:
        # Do not cache nested functions, because the cache would keep all objects in their closures alive.
        return name
    if len(_names) >= _NAMES_KEPT:
        _names.clear()
    _names[target] = name
    return name


def _find_name(target: Any) -> str:
    module = getattr(target, "__module__", None)
    qualname = getattr(target, "__qualname__", None)
    for name in (qualname, getattr(target, "__name__", None)):
        if isinstance(name, str) and getattr(torch, name, None) is target:
            return f"torch:{name}"
    if (
        not isinstance(module, str)
        or not isinstance(qualname, str)
        or (hasattr(target, "__self__") and not _plain(target))
    ):
        raise TypeError(f"{target!r} has no name by which another rank could find it; pass a function or a class")
    return f"{_MAIN[0] if module in _MAIN else module}:{qualname}"


def _plain(target: Any) -> bool:
    """Return whether the target is a function of a C module, recognized by its `__self__`, which is that module."""
    return type(target) is type(len) and getattr(getattr(target, "__self__", None), "__name__", "") == target.__module__


class ExportTable:
    """Functions and classes that one agent lets peers call.

    Args:
        trusted: Whether peers may call anything that can be imported.
        further: Additional functions and classes, exposed on this agent only.
    """

    def __init__(self, trusted: bool, further: Iterable[Any] = ()) -> None:
        self.trusted = trusted
        self._own = {name_of(target): target for target in further}

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function or class with the given name. Raises `NotExposedError`."""
        found = self._own.get(name) or _exposed.get(name)
        if found is None and self.trusted:
            found = _imported(name)
        if callable(found):
            return found  # type: ignore[no-any-return]  # callable, as checked
        if self.trusted:
            raise NotExposedError(f"{name.replace(':', '.')} cannot be imported on the rank that was called")
        raise NotExposedError(
            f"{name.replace(':', '.')} is not exposed, so no other rank can call it and nothing ran: put "
            "@unisono.rpc.expose above it in the code of every rank, name it in rpc.init(..., expose=[...]), or pass "
            "trusted=True to rpc.init on the rank that is called"
        )

    def finds(self, name: str, target: Any) -> bool:
        """Return whether `name` leads to `target`, either among the exposed functions or by importing it."""
        return self._own.get(name) is target or _exposed.get(name) is target or _imported(name) is target

    def given(self, function: Any) -> Callable[..., Any]:
        """Return a function that was sent by value with the call. Raises `NotExposedError`."""
        if not self.trusted or not callable(function):
            raise NotExposedError("only a rank that trusts its peers runs functions sent with a call")
        return function  # type: ignore[no-any-return]  # callable, as checked

    def method(self, owner: object, name: str) -> Callable[..., Any]:
        """Return a bound method of an object that another rank refers to. Raises `NotExposedError`."""
        cls = type(owner)
        if not self.trusted and ((name.startswith("_") and name != "__call__") or not self._open(cls, name)):
            raise NotExposedError(
                f"{cls.__module__}.{cls.__qualname__}.{name} is not exposed, so no other rank can call it and nothing "
                "ran: put @unisono.rpc.expose above the class, or pass trusted=True to rpc.init on the rank that is "
                "called"
            )
        return getattr(owner, name)  # type: ignore[no-any-return]  # callable, as checked

    def _open(self, cls: type, name: str) -> bool:
        """Return whether a class, a base class, or the named method is exposed. Tensor classes are always exposed."""
        if issubclass(cls, torch.Tensor):
            return True
        for base in cls.__mro__:
            if isinstance(vars(base).get(_MARK), _Mark) or any(base is own for own in self._own.values()):
                return True
            method = vars(base).get(name)
            if method is not None and isinstance(getattr(method, "__dict__", {}).get(_MARK), _Mark):
                return True
        return False


def _imported(name: str) -> Any:
    module, _, qualname = name.partition(":")
    if not module or "<" in qualname:
        return None
    candidates = [m for m in _MAIN if m in sys.modules] if module == _MAIN[0] else [module]
    for candidate in candidates:
        try:
            found: Any = importlib.import_module(candidate)
            for part in qualname.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            continue
        return found
    return None
