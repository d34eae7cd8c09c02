"""Activity of a rank: its latest calls, their call sites, the peers that it is waiting for, and its stack."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from operator import itemgetter
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

from unisono.core import clock
from unisono.core.group import Group
from unisono.core.life import Life

__all__ = [
    "ALL_RANKS",
    "NOT_THE_USERS",
    "Activity",
    "ActivityRegistry",
    "EventRecorder",
    "PendingMessage",
    "Place",
    "Record",
    "call_site",
    "called_at",
    "callers_place",
    "callers_places",
    "format_call",
    "is_installed",
    "is_internal",
    "is_users",
    "site_of",
    "site_text",
    "thread_frames",
    "users_frame",
    "with_callers",
]

_KEPT = 2048
_FEW = 16
_SHOWN = 5
_FRAMES = 12
_DEADLOCK_S = 0.5

_TAGS = 256

ALL_RANKS = -1
"""Peer number for calls that all ranks make but that have no number among the collectives, such as a split."""

PendingMessage = tuple[str, int, int, int]
"""An awaited message: "send" or "recv", the peer, the tag, and the sequence number, starting at 1.

Tags are stored modulo 256, because a program that uses each tag only once would otherwise add a counter per message.
"""


Place = str | tuple[CodeType, int] | None
"""A line of the program: its text, or a code object and an instruction offset that are formatted on request."""

Record = tuple[str, int | None, object, Place, float, float]
"""A call: the arguments of `format_call`, the monotonic time of the call, and `Activity.outside_s` at that time."""


def format_call(name: str, number: int | None, detail: object, place: Place) -> str:
    """Return a call as text.

    Args:
        name: Name of the operation.
        number: Sequence number among the group's collectives, if the call is a collective.
        detail: Further details, formatted only when shown.
        place: Line that makes the call.

    Example:
        >>> format_call("all_reduce", 7, "sum", "train.py:12")
        'all_reduce #7 (sum) at train.py:12'
    """
    site = site_text(place)
    text = str(detail)
    numbered = "" if number is None else f" #{number}"
    detailed = f" ({text})" if text and name != "barrier" else ""
    return f"{name}{numbered}{detailed}{f' at {site}' if site else ''}"


class Activity:
    """Recent calls of a communicator on this rank: collectives and messages. Readable from any thread.

    Recording a call costs a fraction of a microsecond; everything else is computed on request.

    Attributes:
        life: Phase of the communicator.
        owner: Thread that makes the calls.
        calls: Number of collectives called.
        messages: Number of batches of messages posted.
        posted: Number of messages of each kind.
        inside: Whether this rank is inside a call.
        since: Monotonic time at which the current call began or the last one ended.
        outside_s: Seconds that this rank had spent outside calls when the last call began.
        now: Current call, or None.
        awaited: Messages that the current call waits for.
        timed_out: Whether the last wait timed out.
        in_background: Whether the call runs in one of the library's threads, so that the thread `owner` can do other
            work.
        keep: Function that adds a collective to `latest`.
        keep_message: Function that adds a batch of messages to `latest`, which retains fewer batches than collectives.
        record: Recorder of the events that must survive this process, or None.
    """

    def __init__(self, group: Group) -> None:
        # Calls write these fields without a lock, which would slow down the fast path. A report may therefore combine
        # the fields of two calls.
        self.group = group
        self.life: Life = Life()
        self.owner: int = threading.get_ident()
        self.calls: int = 0
        self.messages: int = 0
        self.inside: bool = False
        self.in_background = False
        self.awaited: tuple[PendingMessage, ...] = ()
        self.posted: dict[tuple[str, int, int], int] = {}
        self.now: Record | None = None
        # In a shared queue, messages would displace the collectives that `metrics` evaluates.
        self._collectives: deque[Record] = deque(maxlen=_KEPT)
        self._messages: deque[Record] = deque(maxlen=_FEW)
        self.keep: Callable[[Record], None] = self._collectives.append
        self.keep_message: Callable[[Record], None] = self._messages.append
        self.since: float = clock.now()
        self.outside_s: float = 0.0
        self.timed_out: bool = False
        self.record: EventRecorder | None = None

    @property
    def latest(self) -> list[Record]:
        """The latest calls, newest last."""
        return sorted([*self._collectives, *self._messages], key=itemgetter(4))

    # -- reports from the engine ---------------------------------------------------------------
    def note(self, name: str, number: int | None, detail: object, place: Place) -> None:
        """Record a call. Arguments as for `format_call`."""
        now = clock.now()
        outside_s = self.outside_s if self.inside else self.outside_s + now - self.since
        record = name, number, detail, place, now, outside_s
        if number is not None:
            self.keep(record)
            self.calls = number
        else:
            self.keep_message(record)
            self.messages += 1

    def enter(
        self,
        name: str,
        number: int | None,
        detail: object,
        place: Place,
        awaited: tuple[PendingMessage, ...] = (),
    ) -> Record:
        """Mark a call as running or awaited; return its record. Arguments as for `format_call`."""
        now = clock.now()
        self.outside_s = outside_s = self.outside_s + now - self.since
        self.now = (name, number, detail, place, now, outside_s)
        self.awaited = awaited
        self.since = now
        self.inside = True
        if self.record is not None:
            self.record.put("enter", self.group.name, self.group.rank, number, format_call(name, number, detail, place))
        return self.now

    def leave(self) -> None:
        """Mark the call as ended."""
        self.inside = False
        self.since = clock.now()
        # Don't record the end of a failed call, whose error has been recorded already.
        if self.record is not None and self.now is not None and self.life.cause is None:
            self.record.put("leave", self.group.name, self.group.rank, self.now[1], format_call(*self.now[:4]))

    def fail(self, *, timed_out: bool) -> None:
        """Mark the communicator as failed. Reports include the communicator even after the program has dropped it."""
        self.timed_out = timed_out
        _LAST_FAILED.append(self)

    def log_event(self, kind: str, text: str) -> None:
        """Record an event other than a call."""
        if self.record is not None:
            self.record.put(kind, self.group.name, self.group.rank, None, text)

    def post(self, kind: str, peer: int, tag: int) -> PendingMessage:
        """Record a posted message; return its identity."""
        key = kind, peer, tag % _TAGS
        self.posted[key] = number = self.posted.get(key, 0) + 1
        return *key, number

    @contextlib.contextmanager
    def exchanging(self, name: str) -> Iterator[None]:
        """Return a context that marks an unnumbered call of all ranks, such as a split, as running; see `ALL_RANKS`."""
        self.enter(name, None, "", callers_place(), (self.post(name, ALL_RANKS, 0),))
        try:
            yield
        finally:
            self.leave()

    # -- for reports --------------------------------------------------------------
    def last(self, count: int = _SHOWN) -> list[str]:
        """The latest calls as text, newest last."""
        return [format_call(*noted[:4]) for noted in self.latest[-count:]]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole activity as built-in types."""
        # A rank that has just timed out counts as waiting, because peers that query its activity at that time are in
        # the same deadlock. The timeout may also have been raised by a wait outside any call.
        now = self.now
        inside = now is not None and (self.inside or (self.timed_out and clock.now() - self.since < _DEADLOCK_S))
        latest = self.latest
        shown = now if inside or not latest else latest[-1]
        # Count the current call as well, because a fast-path call is added to `calls` only after it has ended.
        come = now[1] if inside and now is not None else None
        return {
            "group": self.group.name,
            "rank": self.group.rank,
            "members": list(self.group.members),
            "calls": max(self.calls, come or 0),
            "inside": inside,
            "aside": self.in_background,
            "gave_up": not self.inside,
            "for_s": max(0.0, clock.now() - self.since),
            "call": None if shown is None else format_call(*shown[:4]),
            "number": None if shown is None else shown[1],
            "awaited": [list(one) for one in self.awaited] if inside else [],
            # Copy the items, because the rank may post its first message to another peer meanwhile.
            "posted": [[*key, count] for key, count in list(self.posted.items())],
            "last": self.last(),
            "broken": self.life.cause is not None,
        }


_LAST_FAILED: deque[Activity] = deque(maxlen=_FEW)
"""Kept alive, so that reports still show the calls of a failed communicator that the program has dropped."""


class EventRecorder(Protocol):
    """Destination of events that must survive this process."""

    def put(self, kind: str, group: str, rank: int, number: int | None, text: str) -> None:
        """Record one event."""
        ...


class ActivityRegistry:
    """The activities of a rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Activity] = weakref.WeakSet()

    def add(self, activity: Activity) -> None:
        """Include an activity in reports for as long as it exists."""
        with self._lock:
            self._known.add(activity)

    def open(self) -> list[Activity]:
        """Return the activities of open communicators, the most recently used last."""
        with self._lock:
            # Hold the lock, because other threads may create communicators, and iterating over a set that grows would
            # raise.
            return sorted((a for a in self._known if not a.life.closed), key=lambda a: (a.since, a.group.name))

    def report(self) -> dict[str, Any]:
        """Return this rank's activity: its communicators, most recently used last, and their thread's current stack."""
        known = self.open()
        owner = known[-1].owner if known else threading.main_thread().ident
        return {"pid": os.getpid(), "groups": [activity.to_dict() for activity in known], **_position(owner or 0)}


def _position(thread: int) -> dict[str, Any]:
    """Return the current position of a thread without stopping that thread."""
    frame = thread_frames().get(thread)
    at = users_frame(frame)
    return {
        "site": site_of(at),
        "function": None if at is None else at.f_code.co_qualname,
        "stack": _stack(frame),
        "callers": _stack(None if at is None else at.f_back, is_users),
    }


# One lock for the process, because the garbage collector is switched off for the whole process.
_frames_lock = threading.Lock()


def thread_frames() -> dict[int, FrameType]:
    """Return each thread's frame, by thread identifier. Threads keep running, but a frame's callers remain the same.

    CPython 3.11 creates frame objects on request. The innermost frame of each thread is created under a lock that
    starting a thread also acquires, but callers' frames are created from the running thread's memory. If a garbage
    collection runs while frames are created and a finalizer releases the GIL, all threads deadlock, or a caller is read
    from memory that has been reused. So the garbage collector is off until all frames have been created.
    """
    # Imported here, because only reports read other threads' frames.
    from unisono.core.garbage import no_collection

    with _frames_lock, no_collection():
        frames = sys._current_frames()
        for frame in frames.values():
            # Reading a frame's caller creates that frame.
            deque(with_callers(frame), maxlen=0)
    # Skip this function's own frame.
    frames[threading.get_ident()] = sys._getframe(1)
    return frames


def _stack(frame: FrameType | None, is_shown: Callable[[str], bool] = bool) -> list[str]:
    """Describe the innermost frames whose file passes `is_shown`, innermost last."""
    shown = (each for each in with_callers(frame) if is_shown(each.f_code.co_filename))
    lines = [f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_qualname}" for f in islice(shown, _FRAMES)]
    return lines[::-1]


def with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on; nothing for None."""
    while frame is not None:
        yield frame
        frame = frame.f_back


# Find torch without loading it: processes that only talk to the control plane don't need it.
_TORCH = getattr(find_spec("torch"), "origin", None) or __file__
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# `NOT_THE_USERS` includes the standard modules that call a program's functions: context managers, decorators and
# threads.
NOT_THE_USERS = (
    _OURS,
    os.path.dirname(os.path.abspath(_TORCH)) + os.sep,
    threading.__file__,
    contextlib.__file__,
    functools.__file__,
)
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def callers_place() -> Place:
    """The nearest caller outside the library and torch, as code and instruction offset, which keep no frame alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    # `f_lineno` would search the code's line table in every call; `site_text` searches it only for a report.
    return None if frame is None else (frame.f_code, frame.f_lasti)


def callers_places() -> tuple[Place, Place]:
    """The result of `callers_place`, and the nearest user code; they differ if an installed package makes the call."""
    place = callers_place()
    frame = next((each for each in with_callers(sys._getframe(1)) if is_users(each.f_code.co_filename)), None)
    return place, place if frame is None else (frame.f_code, frame.f_lasti)


def call_site() -> str | None:
    """The nearest caller outside the library and torch, as "file.py:12"; None if every caller is inside them."""
    return site_of(sys._getframe(1))


def site_of(frame: FrameType | None) -> str | None:
    """Like `call_site`, but starting from a given frame."""
    found = _nearest(frame)
    return None if found is None else f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno}"


def _nearest(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside the library and torch."""
    return next((f for f in with_callers(frame) if not f.f_code.co_filename.startswith(NOT_THE_USERS)), None)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, which excludes the standard library and installed packages."""
    inner = _nearest(frame)
    return next((each for each in with_callers(inner) if is_users(each.f_code.co_filename)), inner)


def is_internal(filename: str) -> bool:
    """Return whether a source file belongs to this library."""
    return filename.startswith(_OURS)


def is_installed(filename: str) -> bool:
    """Return whether a source file belongs to the standard library or to an installed package."""
    return filename.startswith((_LIBRARY, "<frozen")) or f"{os.sep}site-packages{os.sep}" in filename


def is_users(filename: str) -> bool:
    """Return whether a source file is the user's: neither internal nor installed."""
    return not filename.startswith(NOT_THE_USERS) and not is_installed(filename)


def _without_columns(code: CodeType) -> CodeType:
    """Return the code with all instructions attributed to its first line, and without column information."""
    # With the column positions of this file's code, a traceback would underline the wrong part of the user's line.
    units = len(code.co_code) // 2
    # Each entry of the line table covers up to 8 instructions, has no columns (code 13), and repeats the previous
    # entry's line.
    entries = (bytes([0x80 | 13 << 3 | min(8, units - start) - 1, 0]) for start in range(0, units, 8))
    return code.replace(co_linetable=b"".join(entries))


_CALL = _without_columns((lambda job: job()).__code__)


def called_at(frame: FrameType | None, job: Callable[[], object]) -> Callable[[], object]:
    """Return a function that runs a job as if called from the user's line, even later or in another thread.

    The function's frame has the file and line of the user's frame, so that reports and tracebacks show them.

    Args:
        frame: Frame whose callers are searched for the user's line.
        job: Function to run.

    Example:
        >>> called_at(sys._getframe(), call_site)() == call_site()
        True
    """
    caller = _nearest(frame)
    if caller is None:
        return job
    code = caller.f_code
    there = _CALL.replace(co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=caller.f_lineno)
    return functools.partial(FunctionType(there, {}), job)


def site_text(place: Place) -> str | None:
    """Return a source position as "file.py:12"."""
    if not isinstance(place, tuple):
        return place
    code, instruction = place
    lines = (number for start, end, number in code.co_lines() if start <= instruction < end and number is not None)
    line = next(lines, code.co_firstlineno)
    return f"{os.path.basename(code.co_filename)}:{line}"
