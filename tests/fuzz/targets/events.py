"""The last events of a rank, as a file that `unisono autopsy` reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

from unisono.diagnostics.event_log import EventLog, read_events

REFUSALS = (ValueError,)
MEMORY = (1 << 20, 30)

_FOLDER = tempfile.TemporaryDirectory(prefix="unisono-fuzz-")
_PATH = Path(_FOLDER.name) / "rank0.events"


def seeds() -> list[bytes]:
    found = []
    for count in (0, 1, 3):
        _PATH.unlink(missing_ok=True)
        record = EventLog(_PATH, 0, kept=2)
        for number in range(count):
            record.put("enter", "world", 0, number, f"all_reduce #{number} at train.py:12")
        del record
        found.append(_PATH.read_bytes())
    return found


def run(data: bytes) -> None:
    _PATH.write_bytes(data)
    for event in read_events(_PATH)[2]:
        assert event.text.isprintable()
