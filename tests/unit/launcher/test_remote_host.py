"""Ranks on another host whose shell never comes to the agent."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from unisono.launcher import remote_host
from unisono.launcher.remote_host import RemoteHost, Shell
from unisono.launcher.script_job import ScriptJob

WITHIN_S = 30.0


class Ends:
    """Events, of which it keeps the ends of ranks."""

    def __init__(self) -> None:
        self.seen: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()

    def output(self, rank: int | None, stream: int, data: bytes) -> None:
        """Drop the output."""

    def ended(self, rank: int, status: int, report: Any) -> None:
        self.seen.put((rank, status, report["text"]))


@pytest.mark.parametrize(
    "words",
    [
        # Another shell, which takes the agent's orders for commands.
        pytest.param(["sh", "-c", "exec sh 2>/dev/null"], id="becomes another"),
        pytest.param(["sh", "-c", "while :; do echo y; sleep 0.05; done"], id="prints forever"),
    ],
)
def test_host_that_never_starts_the_agent_is_given_up(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_host, "_BEGIN_S", 0.2)
    ends = Ends()
    host = RemoteHost(ScriptJob(["x.py"], 2, size=2), (1, 2), 0, ends, Shell("far", words, "python"))
    host.start()
    for rank in range(2):
        ended, status, text = ends.seen.get(timeout=WITHIN_S)
        assert (ended, status) == (rank, -9)
        assert text.startswith("host far, with ranks 0 to 1 of 2, has started none of them: sh was ended by SIGKILL")
        assert "no agent of unisono has begun there within 0.2 s" in text
    assert host.end() == {0: -9, 1: -9}
