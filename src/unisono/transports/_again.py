"""Calls that are made again with the very tensors of an earlier one, and so need nothing but a look at these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from unisono.compiled import compiled
from unisono.transports._guarded import Turns
from unisono.transports._seen import Seen, same, seen

__all__ = ["Reached", "Repeats", "Twice"]

_MOST = 1024
_MOST_SEEN = 4096


_Said = tuple[bytes, bytes]
"""The words of a call, and their sums if all ranks are at the same one."""


class Twice:
    """Tells what comes again, since only that is worth keeping."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], int] = {}

    def __call__(self, *what: Any) -> bool:
        """Whether it is the second time, or the 4th, 8th ...: others may have been in the place of what lasts now."""
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        count = self._seen[what] = self._seen.get(what, 0) + 1
        return count > 1 and not count & (count - 1)

    def clear(self) -> None:
        """Nothing has come yet."""
        self._seen.clear()


class Reached(Protocol):
    """By what ranks learn that all have come to the same call; if they learn it later, this has nothing to do."""

    def reach(self, said: _Said, deadline: float) -> bool: ...


class _Again(NamedTuple):
    target: Seen
    source: Seen
    root: int | None
    said: _Said
    begin: Any
    arguments: tuple[Any, ...]
    divisor: int


@compiled
class Repeats:
    """What is kept of calls, and how they are made again; src/compiled/repeats.c does the same.

    Args:
        agreement: By which ranks learn that all have come to the same call.
        comms: What each call tells, and takes turns by.
    """

    def __init__(self, agreement: Reached, comms: Turns) -> None:
        self._said_by, self._guarded = agreement, comms
        self._again: dict[tuple[str, str, int | None, int, int], _Again] = {}

    def remember(
        self,
        name: str,
        target: Any,
        source: Any,
        op: str,
        root: int | None,
        said: _Said,
        begin: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        divisor: int,
        /,
    ) -> None:
        """Keep how a call is made, for the next one with the same tensors as long as they stay as they are.

        Args:
            name, target, source, op, root: As `call` is given them.
            said: What ranks agree on.
            begin, arguments: What makes it, and what that takes; None where nothing moves.
            divisor: By what the target is divided in the end, if it is not 0.
        """
        if len(self._again) >= _MOST:
            self._again.clear()
        key = name, op, root, id(target), id(source)
        self._again[key] = _Again(seen(target), seen(source), root, said, begin, arguments, divisor)

    def call(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float, /) -> bool:
        """As `Quick.call`."""
        try:
            again = self._again.get((name, op, root, id(target), id(source)))
        except TypeError:
            # What cannot be a key is no operation, and no rank.
            return False
        if again is None or again.root is not root or not same(again.target, target) or not same(again.source, source):
            return self._anew(name, target, source, op, root, deadline)
        agreement, comms = self._said_by, self._guarded
        if not agreement.reach(again.said, deadline):
            return self._unlike(name, target, source, op, root, deadline)
        if again.begin is not None:
            comms.deadline = deadline
            try:
                with comms.turn:
                    again.begin(*again.arguments)
            except BaseException as error:
                # Whoever derives from this says which are MPI's; all others come back as they are.
                told = self._explained(error)
                if told is error:
                    raise
                raise told from error
            finally:
                comms.deadline = None
        return self._divided(target) if again.divisor else True

    # -- what the transport adds: the C class has no such methods, so they cannot be abstract ------------
    def _anew(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        """`call`, of which nothing is kept."""
        raise NotImplementedError

    def _unlike(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        """The rest of `call`, after an agreement that did not come out as it was said."""
        raise NotImplementedError

    def _explained(self, error: BaseException) -> BaseException:
        """What to raise in the place of an error that a call has ended by."""
        raise NotImplementedError

    def _divided(self, target: Any) -> bool:
        """The end of an average."""
        raise NotImplementedError
