"""Checks a request's arguments against its handler's annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

__all__ = ["check_form"]

_EARLIER = ("self", "client", "request")

_Test = Callable[[object], bool]


def check_form(handler: Callable[..., Any], verb: str, arguments: Sequence[object]) -> None:
    """Raise `TypeError` unless these arguments, sent by another process, fit the request's handler.

    Args:
        handler: A method whose parameters after `client` and `request` have type str, int, float, bool, bytes, lists of
            those, or None.
        verb: Name of the request.
        arguments: The arguments as received.

    Example:
        >>> def on_add(client: int, request: int, key: str, amount: int = 1) -> None: ...
        >>> check_form(on_add, "add", ["count", 2])
        >>> check_form(on_add, "add", ["count", "2"])
        Traceback (most recent call last):
            ...
        TypeError: amount of the request 'add' cannot be a str
    """
    tests = _tests(getattr(handler, "__func__", handler))
    if len(arguments) > len(tests):
        raise TypeError(f"the request {verb!r} has {len(arguments)} arguments, more than {len(tests)}")
    for (name, fits), given in zip(tests, arguments, strict=False):
        if not fits(given):
            raise TypeError(f"{name} of the request {verb!r} cannot be a {type(given).__name__}")


@cache
def _tests(handler: Callable[..., Any]) -> list[tuple[str, _Test]]:
    hints = get_type_hints(handler)
    return [(name, _test(hints[name])) for name in inspect.signature(handler).parameters if name not in _EARLIER]


def _test(hint: Any) -> _Test:
    if isinstance(hint, UnionType):
        tests = [_test(each) for each in get_args(hint)]
        return lambda given: any(fits(given) for fits in tests)
    if get_origin(hint) is not None:
        (inside,) = map(_types, get_args(hint))
        # Compare sets of types, which is fast even for long lists, such as the members of a large group.
        return lambda given: isinstance(given, (list, tuple)) and {*map(type, given)} <= inside
    known = _types(hint)
    # Compare exact types: a bool is an int, but True is not a rank.
    return lambda given: type(given) in known


def _types(hint: type) -> set[type]:
    return {float, int} if hint is float else {hint}
