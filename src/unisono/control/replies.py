"""What a rank takes for an answer of the control plane."""

from __future__ import annotations

from unisono import wire
from unisono.control.groups import Reply

__all__ = ["reply_of"]

_ANSWERS = ("ok", "failed")
_NEWS = ("failed", "goodbye", "asked")


def reply_of(content: bytes) -> Reply:
    """The reply in a frame.

    Raises:
        ValueError: No server sends such a thing.
    """
    value = wire.decode(content)
    if not isinstance(value, tuple) or len(value) != 3:
        raise ValueError("a reply out of form")
    number, outcome, body = value
    if type(number) is not int or not isinstance(outcome, str) or outcome not in (_ANSWERS if number else _NEWS):
        raise ValueError("a reply out of form")
    if outcome == "failed":
        _check_cause(body, of_a_group=not number)
    return number, outcome, body


def _check_cause(body: object, *, of_a_group: bool) -> None:
    """The fields of a cause, after the name of the group if it is told of one."""
    fields = body if isinstance(body, tuple) else ()
    texts = 2 + of_a_group
    if len(fields) != texts + 1:
        raise ValueError("a cause out of form")
    rank = fields[-2]
    others = (*fields[:-2], fields[-1])
    if not all(isinstance(field, str) for field in others) or not (rank is None or type(rank) is int):
        raise ValueError("a cause out of form")
