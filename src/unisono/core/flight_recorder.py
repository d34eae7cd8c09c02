"""Activity of a rank: its last calls, the current call, the peers that it waits for, and its thread's stack."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

from unisono.core.call_site import is_users, line_of, site_of, users_frame
from unisono.core.group import Group

__all__ = ["Activity", "ActivityRegistry", "CallRecord", "PendingMessage", "Recorder", "format_call"]

_KEPT = 16
_TOLD = 5
_FRAMES = 12
_KNOT_S = 0.5

_TAGS = 256

PendingMessage = tuple[str, int, int, int]
"""A message that is waited for: "send" or "recv", the peer, the tag, and which one of these it is, from 1.

Tags that are equal modulo 256 are counted together, on every rank: a program may use each tag once.
"""


CallRecord = tuple[str, int | None, str, "str | tuple[CodeType, int] | None"]
"""One call: its name, its number among the collectives, further details, and its place in the program."""


def format_call(noted: CallRecord) -> str:
    """Return a call as text.

    Example:
        >>> format_call(("all_reduce", 7, "sum", "train.py:12"))
        'all_reduce #7 (sum) at train.py:12'
    """
    name, number, detail, place = noted
    site = line_of(*place) if isinstance(place, tuple) else place
    number_told = "" if number is None else f" #{number}"
    told = f" ({detail})" if detail and name != "barrier" else ""
    return f"{name}{number_told}{told}{f' at {site}' if site else ''}"


class Activity:
    """Recent activity of one communicator of this rank. Any thread may read it.

    Recording a call costs a fraction of a microsecond; everything else is computed on request.

    Attributes:
        owner: The thread that makes the calls.
        calls: Number of collectives called.
        messages: Number of batches of messages posted; `calls` counts collectives.
        posted: Number of messages of each kind.
        inside: Whether this rank is in a call.
        since: Monotonic time at which the last call began, or ended if the rank is in none.
        now: The current call, if any.
        awaited: The messages that the current call waits for.
        timed_out: Whether the last wait timed out.
        in_background: Whether the call runs in a thread of the library, while the owner may do other things.
        keep: Adds a call to the latest calls.
        record: Recorder of the events that must survive this process, if any.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owner = threading.get_ident()
        self.calls, self.messages, self.inside, self.in_background = 0, 0, False, False
        self.awaited: tuple[PendingMessage, ...] = ()
        self.posted: dict[tuple[str, int, int], int] = {}
        self.now: CallRecord | None = None
        self._latest: deque[CallRecord] = deque(maxlen=_KEPT)
        self.keep: Callable[[CallRecord], None] = self._latest.append
        self.since = time.monotonic()
        self.broken = self.closed = self.timed_out = False
        self.record: Recorder | None = None

    @property
    def latest(self) -> list[CallRecord]:
        """The last calls, the newest at the end."""
        return list(self._latest)

    # -- reports of the engine -----------------------------------------------------------------
    def note(self, noted: CallRecord) -> None:
        """Record a call."""
        self.keep(noted)
        if noted[1] is not None:
            self.calls = noted[1]
        else:
            self.messages += 1

    def enter(self, noted: CallRecord, awaited: tuple[PendingMessage, ...] = ()) -> None:
        """Mark the call as running, or waited for."""
        self.now, self.awaited = noted, awaited
        self.since = time.monotonic()
        self.inside = True
        if self.record is not None:
            self.record.put("enter", self.group.name, self.group.rank, noted[1], format_call(noted))

    def leave(self) -> None:
        """Mark the call as ended."""
        self.inside = False
        self.since = time.monotonic()
        # The error of a failed call has been reported already.
        if self.record is not None and self.now is not None and not self.broken:
            self.record.put("leave", self.group.name, self.group.rank, self.now[1], format_call(self.now))

    def log_event(self, kind: str, text: str) -> None:
        """Record another event."""
        if self.record is not None:
            self.record.put(kind, self.group.name, self.group.rank, None, text)

    def post(self, kind: str, peer: int, tag: int) -> PendingMessage:
        """Record a posted message; return its identity."""
        key = kind, peer, tag % _TAGS
        self.posted[key] = number = self.posted.get(key, 0) + 1
        return *key, number

    # -- what others want to know --------------------------------------------------------------
    def last(self, count: int = _TOLD) -> list[str]:
        """The last calls, the newest at the end."""
        return [format_call(noted) for noted in self.latest[-count:]]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole activity as plain values."""
        # A rank that has just timed out counts as waiting: peers that query at the same time are in the same deadlock.
        # An error of the program may come from a wait outside of its calls.
        now = self.now
        inside = now is not None and (self.inside or (self.timed_out and time.monotonic() - self.since < _KNOT_S))
        latest = self.latest
        shown = now if inside or not latest else latest[-1]
        # A quick call is counted when it is done.
        come = now[1] if inside and now is not None else None
        return {
            "group": self.group.name,
            "rank": self.group.rank,
            "members": list(self.group.members),
            "calls": max(self.calls, come or 0),
            "inside": inside,
            "aside": self.in_background,
            "gave_up": not self.inside,
            "for_s": max(0.0, time.monotonic() - self.since),
            "call": None if shown is None else format_call(shown),
            "number": None if shown is None else shown[1],
            "awaited": [list(one) for one in self.awaited] if inside else [],
            "posted": [[*key, count] for key, count in list(self.posted.items())],
            "last": self.last(),
            "broken": self.broken,
        }


class Recorder(Protocol):
    """Destination of events that must survive this process."""

    def put(self, kind: str, group: str, rank: int, number: int | None, text: str) -> None:
        """Record one event."""
        ...


class ActivityRegistry:
    """The activities of one rank, and where it keeps them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Activity] = weakref.WeakSet()

    def add(self, activity: Activity) -> None:
        """Include an activity in reports for as long as the object exists."""
        with self._lock:
            self._known.add(activity)

    def report(self) -> dict[str, Any]:
        """Return this rank's activity: its communicators, last used at the end, and the stack of their thread."""
        with self._lock:
            known = sorted((a for a in self._known if not a.closed), key=lambda a: (a.since, a.group.name))
        owner = known[-1].owner if known else threading.main_thread().ident
        frame = sys._current_frames().get(owner or 0)
        at = users_frame(frame)
        return {
            "pid": os.getpid(),
            "groups": [activity.to_dict() for activity in known],
            "site": site_of(at),
            "function": None if at is None else at.f_code.co_qualname,
            "stack": _stack(frame),
            "callers": _stack(None if at is None else at.f_back, is_users),
        }


def _stack(frame: FrameType | None, is_told: Callable[[str], bool] = bool) -> list[str]:
    """The innermost frames of some files, the newest at the end."""
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        if is_told(frame.f_code.co_filename):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        frame = frame.f_back
    return lines[::-1]
