"""The agent on another host that runs a script's ranks there for `unisono run --hosts`.

It receives commands on standard input, and exits with all ranks when that is closed, so nothing outlives the launcher.
It answers on standard output with a marker and then frames, because a shell whose `.bashrc` prints may have written
there first.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from unisono.core.frames import READ_BYTES, FrameChannel, Kind
from unisono.launcher.local_host import LocalHost
from unisono.launcher.script_job import Report, ScriptJob

__all__ = ["MARKER"]

MARKER = b"\0unisono host agent\n"
"""Precedes the first frame. It ends a line, so that its reader can show other lines as they arrive."""


class _Frames:
    """Frames to the launcher."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._channel = FrameChannel()
        os.write(descriptor, MARKER)
        self._writing = threading.Lock()

    def send(self, kind: Kind, data: bytes = b"", rank: int = 0) -> None:
        with self._writing:
            view = memoryview(self._channel.encode(kind, data, rank))
            while view:
                view = view[os.write(self._descriptor, view) :]

    def output(self, rank: int | None, stream: int, data: bytes) -> None:
        if data:
            self.send(Kind(stream), data, -1 if rank is None else rank)

    def ended(self, rank: int, status: int, report: Report | None) -> None:
        # If the launcher is gone, the input has been closed as well, which the main thread notices.
        with suppress(OSError):
            self.send(Kind.ENDED, json.dumps([status, report]).encode(), rank)


def _main() -> None:
    # Other output from this process must not get mixed with the frames.
    link = _Frames(os.dup(1))
    os.dup2(2, 1)
    orders = FrameChannel()
    read = partial(os.read, 0, READ_BYTES)
    first = orders.receive(read, Kind.ORDER)
    if first is None:
        return
    order: dict[str, Any] = first.json()
    folder = Path(order["folder"])
    if not folder.is_dir():
        sys.exit(f"there is no folder {folder} on this host, where the ranks should run as on the launcher's")
    os.chdir(folder)
    os.environ.update(order["environment"])
    host = LocalHost(ScriptJob(**order["job"]), tuple(order["ports"]), order["attempt"], link)
    try:
        host.start()
        link.send(Kind.STARTED)
        for asked in orders.frames(read, Kind.SIGNAL):
            host.signal(asked.number)
    finally:
        statuses = host.end()
    with suppress(OSError):
        link.send(Kind.STATUSES, json.dumps(statuses).encode())


if __name__ == "__main__":
    _main()
