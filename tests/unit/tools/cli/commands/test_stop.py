"""`unisono stop` asks all ranks of a job, and says so if there are none."""

from __future__ import annotations

import json
import os
from contextlib import closing

import pytest

from unisono.control.client import SocketControl
from unisono.control.server import ControlServer
from unisono.core.group import Group
from unisono.tools.cli import main


def test_stop_counts_the_ranks_it_asks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # This process may take part in other jobs, whose sockets come first.
    monkeypatch.setattr(
        "unisono.control.inspect_socket.path_of", lambda kind, pid, number: f"\0{kind} stop/{pid}/{number}"
    )
    pid = str(os.getpid())
    with (
        closing(ControlServer(b"of the tests")) as server,
        closing(SocketControl(server.address, b"of the tests", 10.0)) as rank,
    ):
        assert main(["stop", pid]) == 1
        assert f"process {pid} has no ranks to stop" in capsys.readouterr().err
        group = Group("world", 0, (0,))
        rank.join(group)
        assert main(["stop", pid, "--reason", "spot"]) == 0
        assert "asked 1 rank" in capsys.readouterr().out
        assert main(["stop", pid, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"] == 1
        assert rank.stop_verdict(group, 10.0) == 1
        assert rank.boundaries(group).requested == "spot"
        rank.leave(group)
        assert main(["stop", pid]) == 1
