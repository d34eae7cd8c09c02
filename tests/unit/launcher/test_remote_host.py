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
        # As a shell that waits in its start-up file.
        pytest.param(["sh", "-c", "exec sleep 600"], id="waits forever"),
        pytest.param(["sh", "-c", "while :; do echo y; sleep 0.05; done"], id="prints forever"),
    ],
)
def test_host_that_never_starts_the_agent_is_given_up(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_host, "AGENT_START_S", 0.2)
    ends = Ends()
    host = RemoteHost(ScriptJob(["x.py"], 2, size=2), (1, 2), 0, ends, Shell("far", words, "python"))
    host.start()
    for rank in range(2):
        ended, status, text = ends.seen.get(timeout=WITHIN_S)
        assert (ended, status) == (rank, -9)
        assert text.startswith("host far, with ranks 0 to 1 of 2, has started none of them: sh was ended by SIGKILL")
        assert "no agent of unisono has begun there within 0.2 s" in text
    assert host.end() == {0: -9, 1: -9}


@pytest.mark.parametrize(
    ("bytes_sent", "why"),
    [
        pytest.param(r"\0" * 25, "a frame of kind 0 does not belong here", id="zeros"),
        pytest.param(r"a program that prints here", "a frame is too long", id="text"),
    ],
)
def test_bytes_that_no_agent_sends_end_the_host(bytes_sent: str, why: str) -> None:
    ends = Ends()
    words = ["sh", "-c", rf"printf '\0unisono host agent\n{bytes_sent}'; exec sleep 600"]
    host = RemoteHost(ScriptJob(["x.py"], 1, size=1), (1, 2), 0, ends, Shell("far", words, "python"))
    host.start()
    rank, status, text = ends.seen.get(timeout=WITHIN_S)
    assert (rank, status) == (0, -9)
    assert f"what came from there is not what an agent sends: {why}" in text
    assert host.end() == {0: -9}
