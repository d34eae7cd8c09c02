"""What an agent on another host, and the process that forks ranks, send to the launcher: kinds and contents."""

from __future__ import annotations

import io
import json
from typing import Any

from unisono.core.frames import Frame, Kind
from unisono.launcher.forked_ranks import StartedRank, _on_frame
from unisono.launcher.remote_host import RemoteHost, Shell
from unisono.launcher.script_job import ScriptJob

REFUSALS = (ValueError,)
MEMORY = (1 << 19, 700)
RANKS = 2


class Events:
    """Checks what the launcher relies on."""

    def output(self, rank: int | None, stream: int, data: bytes) -> None:
        assert rank is None or rank in range(RANKS)
        assert stream in (1, 2)

    def ended(self, rank: int, status: int, report: Any) -> None:
        assert rank in range(RANKS)
        assert isinstance(status, int)
        assert report is None or isinstance(report, dict)


def seeds() -> list[bytes]:
    contents: list[tuple[Kind, int, Any]] = [
        (Kind.ENDED, 1, [-9, None]),
        (Kind.ENDED, 0, [1, {"text": "an error"}]),
        (Kind.STATUSES, 0, {"0": 0, "1": 1}),
        (Kind.OUT, 1, "printed"),
    ]
    return [bytes([kind, rank]) + json.dumps(content).encode() for kind, rank, content in contents]


def run(data: bytes) -> None:
    frame = Frame(Kind(data[0] if data else 0), data[1] if len(data) > 1 else 0, data[2:])
    RemoteHost(ScriptJob(["x.py"], RANKS, size=RANKS), (1, 2), 0, Events(), Shell("far", (), "python"))._on_frame(frame)
    if frame.kind == Kind.ENDED:
        ranks = [StartedRank(1, io.BytesIO(), io.BytesIO()) for _ in range(RANKS)]
        try:
            _on_frame(ranks, frame, lambda rank, status: Events().ended(rank, status, None))
        except ValueError:
            assert all(rank.status is None for rank in ranks)
