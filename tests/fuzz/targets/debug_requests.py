"""What a debugger asks a process whose ranks are held. None is held here, so nothing that it asks for is run."""

from __future__ import annotations

import json
from typing import Any

from unisono.control.debug_socket import DebuggedProcess
from unisono.core.frames import Frame, Kind

REFUSALS = (ValueError,)
MEMORY = (1 << 19, 700)


def seeds() -> list[bytes]:
    asked: list[Any] = [{"do": "ranks"}, {"do": "evaluate", "rank": 1, "code": "x", "up": 2}, {"do": "go", "rank": 0}]
    return [json.dumps(each).encode() for each in asked]


def run(data: bytes) -> None:
    answer = DebuggedProcess()._answer(Frame(Kind.DEBUG, 0, data).json())
    assert "ranks" in answer or "error" in answer
