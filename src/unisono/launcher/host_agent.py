"""The process on another host that runs a script's ranks there for `unisono run --hosts`.

It gets its orders by standard input, and ends, with all ranks, when that ends: so nothing outlives its launcher. It
answers by a marker and then frames on standard output: a shell whose `.bashrc` prints has written there before.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.launcher.local_host import LocalHost
from unisono.launcher.script_job import Report, ScriptJob

__all__ = ["ENDED", "HEADER", "MARKER", "STARTED", "STATUSES"]

MARKER = b"\0unisono host agent\n"
"""Precedes the first frame. It ends a line, so that its reader can show others as they come."""

HEADER = struct.Struct(">iBI")
"""Header of a frame: a rank, or -1; the kind; the number of bytes that follow. Kinds 1 and 2 are streams' output."""

STARTED, ENDED, STATUSES = 3, 4, 5


class _Frames:
    """Frames to the launcher."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.write(descriptor, MARKER)
        self._writing = threading.Lock()

    def send(self, rank: int, kind: int, data: bytes) -> None:
        view = memoryview(HEADER.pack(rank, kind, len(data)) + data)
        with self._writing:
            while view:
                view = view[os.write(self._descriptor, view) :]

    def output(self, rank: int | None, stream: int, data: bytes) -> None:
        if data:
            self.send(-1 if rank is None else rank, stream, data)

    def ended(self, rank: int, status: int, report: Report | None) -> None:
        # If the launcher has gone, so has the input, by which the main thread learns that.
        with suppress(OSError):
            self.send(rank, ENDED, json.dumps([status, report]).encode())


def _main() -> None:
    # Whatever else prints here must not get between the frames.
    link = _Frames(os.dup(1))
    os.dup2(2, 1)
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    folder = Path(order["folder"])
    if not folder.is_dir():
        sys.exit(f"there is no folder {folder} on this host, where the ranks should run as on the launcher's")
    os.chdir(folder)
    os.environ.update(order["environment"])
    host = LocalHost(ScriptJob(**order["job"]), tuple(order["ports"]), order["attempt"], link)
    try:
        host.start()
        link.send(-1, STARTED, b"")
        for line in sys.stdin.buffer:
            host.signal(int(line))
    finally:
        statuses = host.end()
    with suppress(OSError):
        link.send(-1, STATUSES, json.dumps(statuses).encode())


if __name__ == "__main__":
    _main()
