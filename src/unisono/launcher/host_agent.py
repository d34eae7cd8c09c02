"""Agent that runs a script's ranks on another host for `unisono run --hosts`.

The agent receives commands on standard input. When standard input is closed, the agent kills all ranks and exits, so
nothing outlives the launcher. The agent writes frames to standard output. A marker precedes the first frame, because a
shell's `.bashrc` may already have printed text.
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
"""Marker before the first frame. It ends with a newline, so that the launcher can read other output line by line."""


class _Frames:
    """Sends frames to the launcher."""

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
        # Ignore a failed write: if the launcher is gone, the main thread exits anyway, because standard input is
        # closed.
        with suppress(OSError):
            self.send(Kind.ENDED, json.dumps([status, report]).encode(), rank)


def _main() -> None:
    # Send frames to a copy of standard output, and redirect standard output to standard error, so that nothing else
    # mixes with the frames.
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
