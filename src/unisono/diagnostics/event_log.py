"""Writer and reader of a log of a rank's last events, in a file that survives any kind of crash.

The file contains a 64-byte header and a ring buffer of 256-byte records. The file is memory-mapped, so the kernel
writes it out even if the process is killed. A record's sequence number is written last, so that a partial record is
detected. The header also contains the start time of the process, because a later process may reuse its pid.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from unisono.host.processes import process_space, process_stat, started

__all__ = ["EventLog", "LoggedEvent", "read_events", "record_of"]

_VARIABLE = "UNISONO_EVENTS"
_MAGIC = b"unisono events 1"
_HEAD = struct.Struct("<16sqqq16sQ")
_NUMBER = struct.Struct("<Q")
_BODY = struct.Struct("<dqI12s48s168s")
_RECORD_BYTES = 256
_KEPT = 512
_MOST_KEPT = 1 << 16
# End of the year 9999, the last time that a datetime can represent.
_LAST_S = 253402300800.0

_log = logging.getLogger("unisono")


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event of a rank.

    Attributes:
        number: Sequence number within the rank, from 1.
        time_s: Wall-clock time.
        kind: "enter" or "leave" (of a call), "error" (in a call or in the program), "end" (the rank ended cleanly), or
            "exit" (the program ended without closing its communicators).
        group, rank: Process group of the communicator, and the rank's number in that group.
        call: Sequence number of the collective in the group; None if the event is not about a collective.
        text: The call and the source line that made it, or the error.
    """

    number: int
    time_s: float
    kind: str
    group: str
    rank: int
    call: int | None
    text: str


class EventLog:
    """Writer of events. Cost: about 2 us per event.

    Args:
        path: File to create; it must not exist.
        rank: Rank that the events belong to.
        kept: Number of events to keep.
    """

    def __init__(self, path: Path, rank: int, kept: int = _KEPT) -> None:
        self._kept = kept
        self._written = 0
        nbytes = _HEAD.size + kept * _RECORD_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(descriptor, nbytes)
            self._memory = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, kept, process_space(), started(os.getpid()))

    def put(self, kind: str, group: str, rank: int, number: int | None, text: str) -> None:
        """Write an event, overwriting the oldest one."""
        place = _HEAD.size + self._written % self._kept * _RECORD_BYTES
        self._written += 1
        call = -1 if number is None else number
        _NUMBER.pack_into(self._memory, place, 0)
        body = time.time(), call, rank, kind.encode(), _bytes(group)[-48:], _bytes(text)[:168]
        _BODY.pack_into(self._memory, place + _NUMBER.size, *body)
        _NUMBER.pack_into(self._memory, place, self._written)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate the file's blocks: on a full disk, a write to mapped memory would otherwise kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def record_of(rank: int) -> EventLog | None:
    """Return the log for this rank's events: a new file in the directory $UNISONO_EVENTS, if that is set.

    If the file cannot be created, a warning is logged, and the job continues.
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


def read_events(path: Path) -> tuple[int, int, list[LoggedEvent], str | None]:
    """Return the process, rank and events of a file, oldest event first, and the process's state.

    The state is "running", "stopped" (by a signal) or "gone"; None if the process ran on another host or in another
    container, which this process cannot inspect. Damaged records are skipped.

    Raises:
        ValueError: `path` is not an event file.
    """
    data = path.read_bytes() if path.stat().st_size <= _HEAD.size + _MOST_KEPT * _RECORD_BYTES else b""
    if len(data) < _HEAD.size:
        raise ValueError(f"{path} holds no events of unisono")
    magic, pid, rank, kept, space, ticks = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 0 < kept <= _MOST_KEPT or len(data) != _HEAD.size + kept * _RECORD_BYTES:
        raise ValueError(f"{path} holds no events of unisono")
    events = []
    for place in range(_HEAD.size, len(data), _RECORD_BYTES):
        (number,) = _NUMBER.unpack_from(data, place)
        if number:
            time_s, call, of, kind, group, text = _BODY.unpack_from(data, place + _NUMBER.size)
            # Skip records with impossible times: in a partially written record, the time may be any number.
            if not 0 <= time_s < _LAST_S:
                continue
            in_group = None if call < 0 else call
            events.append(LoggedEvent(number, time_s, _text(kind), _text(group), of, in_group, _text(text)))
    return pid, rank, sorted(events, key=lambda event: event.number), _process_state(pid, space, ticks)


def _process_state(pid: int, space: bytes, ticks: int) -> str | None:
    if not ticks or space != process_space():
        return None
    if started(pid) != ticks:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(process_stat(pid)[0], "running")


def _text(field: bytes) -> str:
    """Return the text of a field, without control characters that a terminal would interpret."""
    text = field.rstrip(b"\0").decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
