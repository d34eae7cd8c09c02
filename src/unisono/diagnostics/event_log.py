"""The last events of a rank, in a file that survives however the rank ends; and how to read it afterwards.

A file is a head of 64 bytes and records of 256 bytes, used in turn, in memory that is mapped: the kernel writes it
out when the process is gone, whatever ended it. A record's number is written last, so half a record is known as such.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Event", "EventLog", "read_events", "record_of"]

_VARIABLE = "UNISONO_EVENTS"
_MAGIC = b"unisono events 1"
_HEAD = struct.Struct("<16sqqq24x")
_NUMBER = struct.Struct("<Q")
_BODY = struct.Struct("<dqI12s48s168s")
_RECORD_BYTES = 256
_KEPT = 512
_MOST_KEPT = 1 << 16
# As far as a calendar goes.
_LAST_S = 253402300800.0

_log = logging.getLogger("unisono")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a rank did.

    Attributes:
        number: Counts the events of a rank, from 1.
        time_s: Of the clock on the wall.
        kind: "enter" and "leave" a call, "error" in it, or "end" of the rank in peace.
        group, rank: Of the communicator.
        call: The number of a collective in it, if it is one.
        text: The call, with its line; or the error.
    """

    number: int
    time_s: float
    kind: str
    group: str
    rank: int
    call: int | None
    text: str


class EventLog:
    """Writes events. Cost: about 2 us each.

    Args:
        path: The file; made anew.
        rank: Whose events they are.
        kept: How many, the last ones.
    """

    def __init__(self, path: Path, rank: int, kept: int = _KEPT) -> None:
        self._kept, self._written = kept, 0
        nbytes = _HEAD.size + kept * _RECORD_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(descriptor, nbytes)
            self._memory = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, kept)

    def put(self, kind: str, group: str, rank: int, number: int | None, text: str) -> None:
        """Keep one; the oldest makes room."""
        place = _HEAD.size + self._written % self._kept * _RECORD_BYTES
        self._written += 1
        call = -1 if number is None else number
        _NUMBER.pack_into(self._memory, place, 0)
        body = time.time(), call, rank, kind.encode(), _bytes(group)[-48:], _bytes(text)[:168]
        _BODY.pack_into(self._memory, place + _NUMBER.size, *body)
        _NUMBER.pack_into(self._memory, place, self._written)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Make the file that long; on a disk that is full, a write to mapped memory would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def record_of(rank: int) -> EventLog | None:
    """Where this rank is to keep its events: a new file in the directory of $UNISONO_EVENTS, if that is set.

    If there can be none, that is logged, and the job goes on.
    """
    directory = os.environ.get(_VARIABLE)
    if not directory:
        return None
    try:
        return _new_in(Path(directory), rank)
    except OSError as error:
        _log.warning("unisono: no events are kept in %s=%s: %s", _VARIABLE, directory, error.strerror or error)
        return None


def _new_in(folder: Path, rank: int) -> EventLog:
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            return EventLog(folder / f"rank{rank}-{os.getpid()}-{number}.events", rank)
        except FileExistsError:
            number += 1


def read_events(path: Path) -> tuple[int, int, list[Event]]:
    """Process, rank and events of a file, the oldest first.

    Raises:
        ValueError: It is no such file. What is damaged in it is left out.
    """
    data = path.read_bytes() if path.stat().st_size <= _HEAD.size + _MOST_KEPT * _RECORD_BYTES else b""
    if len(data) < _HEAD.size:
        raise ValueError(f"{path} holds no events of unisono")
    magic, pid, rank, kept = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 0 < kept <= _MOST_KEPT or len(data) != _HEAD.size + kept * _RECORD_BYTES:
        raise ValueError(f"{path} holds no events of unisono")
    events = []
    for place in range(_HEAD.size, len(data), _RECORD_BYTES):
        (number,) = _NUMBER.unpack_from(data, place)
        if number:
            time_s, call, of, kind, group, text = _BODY.unpack_from(data, place + _NUMBER.size)
            said = (_text(field) for field in (kind, group, text))
            kind_said, group_said, text_said = said
            # Where half of it was written, any number may stand.
            if not 0 <= time_s < _LAST_S:
                continue
            events.append(Event(number, time_s, kind_said, group_said, of, None if call < 0 else call, text_said))
    return pid, rank, sorted(events, key=lambda event: event.number)


def _text(field: bytes) -> str:
    """What was written, and nothing that a terminal would obey."""
    said = field.rstrip(b"\0").decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in said)
