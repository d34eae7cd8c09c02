"""Exceptions from other ranks. The caller gets the original class, if known, with the remote traceback in its text."""

from __future__ import annotations

import types
from typing import Any

from unisono import serialization
from unisono.core.failure import text_of
from unisono.diagnostics.tracebacks import format_error
from unisono.serialization.classes import class_of

__all__ = ["RemoteError", "packed", "rebuilt"]

_Report = tuple[str, str, Any, str]


class RemoteError(Exception):
    """Error raised on another rank; also an instance of its original class, if this process knows that class.

    Attributes:
        rank: Rank that raised the error.
        remote_text: The error's `str` on that rank.
        remote_traceback: The error's traceback on that rank.

    Example:
        >>> def program(comm):
        ...     un.rpc.init(comm, expose=[torch.zeros])
        ...     try:
        ...         un.rpc.rpc_sync(0, torch.zeros, (-1,))
        ...     except un.rpc.RemoteError as error:
        ...         return error.rank, isinstance(error, RuntimeError)
        ...     finally:
        ...         un.rpc.shutdown()
        >>> un.launch(program, 1, "thread")
        [(0, True)]
    """

    rank: int | None = None
    remote_text = ""
    remote_traceback = ""

    def __str__(self) -> str:
        where = f"\n\nOn rank {self.rank}:\n{self.remote_traceback}" if self.remote_traceback else ""
        return f"{self.remote_text}{where}"

    def __reduce__(self) -> Any:
        kind = type(self).__mro__[2] if type(self) is not RemoteError else Exception
        fields = {k: v for k, v in vars(self).items() if k not in ("rank", "remote_text", "remote_traceback")}
        return _made, (kind, self.args, fields, self.rank, self.remote_text, self.remote_traceback)


_classes: dict[type[BaseException], type[RemoteError]] = {RemoteError: RemoteError, Exception: RemoteError}
"""Classes created by `_joined`, cached so that all errors of one class have the same type."""


def packed(error: BaseException) -> _Report:
    """Convert an exception to values: its class's module and name, text, arguments and fields, and traceback."""
    if isinstance(error, RemoteError):
        # This rank got the error from a third rank, so report the original class.
        kind = type(error).__mro__[2] if type(error) is not RemoteError else Exception
        # Use the text without the traceback, because `trace` already has the traceback. A text that included it would
        # double in length with each rank that passes the error on.
        text = error.remote_text
    else:
        kind = type(error)
        text = text_of(error)
    trace = format_error(error)
    content: Any = (tuple(error.args), dict(vars(error)))
    try:
        serialization.encode(content)
    except Exception:
        # The error must reach the caller in any case. If its contents cannot be sent, send only its text.
        content = ((text,), {})
    return f"{kind.__module__}:{kind.__qualname__}", text, content, trace


def rebuilt(report: _Report, rank: int) -> Exception:
    """Return the exception to raise, from the values that `packed` returned. Classes are looked up, never imported."""
    name, text, (args, fields), trace = report
    try:
        return _made(_class_of(name), args, fields, rank, text, trace)
    except TypeError:
        # Some classes, such as exception groups, cannot be instantiated from the arguments that were sent.
        return _made(Exception, args, fields, rank, text, trace)


def _made(
    kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any], rank: int, text: str, trace: str
) -> Exception:
    joined = _joined(kind)
    maker: type = joined
    # Bypass the class's own constructor: a peer's message must not run any Python code.
    while not isinstance(vars(maker).get("__new__"), types.BuiltinFunctionType):
        maker = maker.__base__ or BaseException
    error: RemoteError = maker.__new__(joined, *args)
    error.args = args
    for name, value in fields.items():
        if not name.startswith("__"):
            vars(error)[name] = value
    vars(error).update(rank=rank, remote_text=text, remote_traceback=trace)
    return error


def _joined(kind: type[BaseException]) -> type[RemoteError]:
    """Return a subclass of both `RemoteError` and the given class."""
    if kind not in _classes:
        try:
            space = {"__module__": kind.__module__, "__doc__": kind.__doc__}
            _classes[kind] = type(kind.__name__, (RemoteError, kind), space)
        except TypeError:
            # `RemoteError` and `kind` cannot have a common subclass.
            _classes[kind] = RemoteError
    return _classes[kind]


def _class_of(name: str) -> type[BaseException]:
    found = class_of(name)
    return found if found is not None and issubclass(found, Exception) else Exception
