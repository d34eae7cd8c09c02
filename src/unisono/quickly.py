"""What an engine does around a call by its transport's shorter way. There is a microsecond for it."""

from __future__ import annotations

from contextvars import ContextVar
from sys import _getframe
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import increment_version

from unisono.activity import Activity, Noted
from unisono.standing import ANYONE
from unisono.transport import Quick, QuickMessages, Tensors

if TYPE_CHECKING:
    from unisono.control import Cause

__all__ = ["Quickly"]


class Quickly:
    """The part of an engine that is in haste.

    Attributes:
        quick: The transport's shorter way, if it has one.
        activity, owner, closed: As of `Standing`.
        _inside: Threads that are in a collective; a signal handler there may not start another.
    """

    quick: Quick | None
    quick_messages: QuickMessages | None
    activity: Activity
    owner: int | None
    closed: bool
    _broken: Cause | None
    _calls: int
    _pending: int
    _rank: int
    _inside: set[int]
    _limit_s: float
    _sink: ContextVar[Any]

    def quickly(
        self, name: str, target: Tensors, source: Tensors, op: str, root: int | None, timeout: float | None, /
    ) -> bool:
        """Make a blocking call by the transport's shorter way, as `Quick.call`; False if it is still to be made."""
        quick, here = self.quick, get_ident()
        if quick is None or (self.owner != here and self.owner != ANYONE):
            return False
        if self._pending or self._inside or self._broken is not None or self.closed or self._sink.get() is not None:
            return False
        limit = self._limit_s if timeout is None else self._patience(timeout)
        caller, activity = _getframe(2), self.activity
        detail = op if root is None else f"root {root}"
        # What is kept of the caller holds nothing alive, and becomes a line only if somebody asks.
        noted = activity.now = (name, self._calls + 1, detail, (caller.f_code, caller.f_lasti))
        activity.awaited = ()
        # As `enter`, `note` and `leave` do, without the calls.
        activity.since = now = monotonic()
        self._inside.add(here)
        if activity.record is None:
            activity.inside = True
        else:
            activity.enter(noted)
        try:
            done = quick.call(name, target, source, op, root, now + limit)
            if done:
                if target is not None and (root is None or self._is_written(name, root)):
                    increment_version(target)
                activity.calls = self._calls = self._calls + 1
                activity.keep(noted)
        except BaseException as error:
            # Interrupts, too: others have seen a part of the call.
            told = self._blamed(error, noted)
            if told is error:
                raise
            raise told from error
        finally:
            self._inside.discard(here)
            if activity.record is None:
                activity.since, activity.inside = monotonic(), False
            else:
                activity.leave()
        return done

    def move_quickly(self, name: str, tensor: Any, peer: Any, tag: int, timeout: float | None, /) -> bool:
        """Send or receive by the transport's shorter way, as `QuickMessages.move`; False if it is still to be done."""
        quick, here = self.quick_messages, get_ident()
        if quick is None or self.owner != here or self._inside or self._broken is not None or self.closed:
            return False
        if self._sink.get() is not None or not quick.takes(tensor, peer, tag):
            return False
        limit = self._limit_s if timeout is None else self._patience(timeout)
        caller, activity = _getframe(2), self.activity
        detail = f"{'to' if name == 'send' else 'from'} rank {peer}{f', tag {tag}' if tag else ''}"
        noted = name, None, f"{detail}, {tensor.nbytes} B", (caller.f_code, caller.f_lasti)
        awaited = activity.post(name, peer, tag)
        activity.enter(noted, (awaited,))
        self._inside.add(here)
        try:
            done = quick.move(name, tensor, peer, tag, monotonic() + limit)
        except BaseException as error:
            told = self.failed(error, name, activity.messages + 1)
            if told is error:
                raise
            raise told from error
        finally:
            self._inside.discard(here)
            activity.leave()
        if done:
            activity.messages += 1
            activity.keep(noted)
            if name == "recv":
                increment_version(tensor)
        else:
            activity.posted[awaited[:3]] -= 1
        return done

    def _is_written(self, name: str, root: int) -> bool:
        """Whether a call with a root writes to the target here: transports write past torch's functions."""
        return (name != "broadcast" or root != self._rank) and (name != "reduce" or root == self._rank)

    # -- what an engine adds: the C class has no such methods, so they cannot be abstract ---------------
    def _patience(self, timeout: float) -> float:
        """How long a call may take that was told a time; or what is wrong with it."""
        raise NotImplementedError

    def failed(self, error: BaseException, operation: str, call: int | None = None) -> BaseException:
        """As of `Standing`."""
        raise NotImplementedError

    def _blamed(self, error: BaseException, noted: Noted) -> BaseException:
        """The error to raise where a call has ended by one: the same, or another."""
        raise NotImplementedError
