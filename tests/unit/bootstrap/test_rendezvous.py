"""Ranks find each other, by every way there is, and part again."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bootstrap_helpers import SOON, meet
from insides import cut
from waiting import is_refused, run_concurrently, wait_until

from unisono.bootstrap import Rendezvous, find
from unisono.bootstrap.rendezvous import hosts_at
from unisono.control.client import SocketControl
from unisono.control.local import LocalControl
from unisono.control.server import ControlServer
from unisono.control.sockets import find_secret
from unisono.core.group import Group
from unisono.errors import CommTimeoutError, PeerLostError

pytestmark = pytest.mark.usefixtures("nobody_started_us")

Start = Callable[..., "subprocess.Popen[str]"]


# -- the ways --------------------------------------------------------------------------------------
def test_single_rank() -> None:
    place, other = find(), find()
    assert (place.rank, place.size, place.address) == (0, 1, "127.0.0.1")
    assert isinstance(place.control, LocalControl)
    assert place.name != other.name
    assert place.control.exchange(Group.world(0, 1, place.name), "x", 5, 1.0) == [5]
    assert "world of one" in place.source
    place.close()
    other.close()


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_PROCID"):
        monkeypatch.setenv(name, "")
    place = find()
    assert (place.rank, place.size) == (0, 1)
    place.close()


RANK = """
    import os, sys
    from unisono.bootstrap import find
    from unisono.bootstrap.rendezvous import hosts_at
    from unisono.core.group import Group

    method, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    given = () if method == "env" else (method, rank, size)

    def say(place):
        group = Group.world(place.rank, place.size, place.name)
        values = place.control.exchange(group, "hello", (place.rank, place.name), 20.0)
        print(values, place.address, hosts_at(place.control.address))

    one = find(*given, timeout_s=20.0)
    two = find(*given, timeout_s=20.0)
    say(two)
    say(one)
    one.close()
    two.close()
    three = find(*given, timeout_s=20.0)
    say(three)
    if rank != 1:
        three.close()
"""


# Only torch's store needs torch in each process: tests/launchers/test_beside_torch.py meets there, in forks.
@pytest.mark.parametrize("method", ["tcp", "file", pytest.param("env", marks=pytest.mark.soak)])
def test_three_processes_and_three_worlds(start: Start, tmp_path: Path, port: int, method: str) -> None:
    urls = {"tcp": f"tcp://localhost:{port}", "file": f"file://{tmp_path}/meet", "env": "env"}
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if method == "env" else {}
    ranks = [start(RANK, urls[method], rank, 3, env={**env, "RANK": str(rank)} if env else env) for rank in range(3)]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [error for _, error in said] == [""] * 3
    for rank, (lines, _) in enumerate(said):
        names = [f"{[(r, name) for r in range(3)]} 127.0.0.1 {rank == 0}" for name in ("world2", "world1")]
        assert lines.splitlines()[:2] == names
        # The server may have ended in between, and then counts from 0; all ranks agree on it.
        assert lines.splitlines()[2].split("]")[0] == said[0][0].splitlines()[2].split("]")[0]
    assert not (tmp_path / "meet").exists()


@pytest.mark.soak
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
from pathlib import Path
from unisono.bootstrap import find
from unisono.core.group import Group
places = [find(timeout_s=30.0) for _ in range(2)]
for place in places:
    assert place.control.exchange(Group.world(place.rank, 2, place.name), "x", place.rank, 20.0) == [0, 1]
Path(__file__).with_name(f"said {places[0].rank}").write_text(
    f"{[p.name for p in places]} {places[0].local_rank} {places[0].size} {places[0].source}"
)
for place in places:
    place.close()
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = (tmp_path / f"said {rank}").read_text()
        assert said.startswith(
            f"['world1', 'world2'] {rank} 2 rank {rank} of 2 from the environment, rendezvous at torchrun's"
        )


def test_rank_0_may_start_last(port: int) -> None:
    connecting = threading.Event()
    real = socket.create_connection

    def watched(*arguments: Any) -> socket.socket:
        connecting.set()
        return real(*arguments)

    def first() -> Rendezvous:
        assert connecting.wait(SOON)
        return find(f"tcp://127.0.0.1:{port}", 0, 2, SOON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", watched)
        places = run_concurrently(first, lambda: find(f"tcp://127.0.0.1:{port}", 1, 2, SOON))
    assert [place.rank for place in places] == [0, 1]
    for place in places:
        place.close()
        place.close()


# -- ends ------------------------------------------------------------------------------------------
def test_rank_0_may_close_first(port: int) -> None:
    places = meet(f"tcp://127.0.0.1:{port}", 2)
    assert hosts_at(("127.0.0.1", port))
    places[0].close()
    places[1].control.set("still", b"here")
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        places[1].control.exchange(Group.world(1, 2, places[1].name), "x", 1, SOON)
    places[1].close()
    assert wait_until(lambda: is_refused(("127.0.0.1", port)), SOON)


def test_server_ended_during_rendezvous_is_replaced(port: int) -> None:
    old = ControlServer(find_secret(), "127.0.0.1", port)
    seated = threading.Event()
    real = SocketControl.register_rank

    def watched(self: SocketControl, *arguments: Any) -> str:
        name = real(self, *arguments)
        seated.set()
        return name

    def first() -> Rendezvous:
        assert seated.wait(SOON)
        old.close()
        return find(f"tcp://127.0.0.1:{port}", 0, 2, SOON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketControl, "register_rank", watched)
        places = run_concurrently(first, lambda: find(f"tcp://127.0.0.1:{port}", 1, 2, SOON))
    assert [place.rank for place in places] == [0, 1]
    for place in places:
        place.close()


def test_rank_that_follows_a_withdrawn_address_meets_the_others_at_the_same_server(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet"
    first = meet(url, 3)
    first[1].close()
    seated, left = threading.Event(), threading.Event()
    register, close = SocketControl.register_rank, SocketControl.close

    def watched_register(self: SocketControl, *arguments: Any) -> str:
        name = register(self, *arguments)
        seated.set()
        return name

    def watched_close(self: SocketControl) -> None:
        close(self)
        if self is not first[0].control:
            left.set()

    def withdraws_and_comes_again() -> Rendezvous:
        assert seated.wait(SOON)
        first[0].close()
        assert left.wait(SOON)
        return find(url, 0, 3, SOON)

    def keeps_the_server() -> Rendezvous:
        assert left.wait(SOON)
        return find(url, 2, 3, SOON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketControl, "register_rank", watched_register)
        patch.setattr(SocketControl, "close", watched_close)
        second = run_concurrently(withdraws_and_comes_again, lambda: find(url, 1, 3, SOON), keeps_the_server)
    assert [(place.rank, place.name) for place in second] == [(0, "world2"), (1, "world2"), (2, "world2")]
    for place in (first[2], *second):
        place.close()


def test_rank_that_is_killed_while_others_gather_may_come_again(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    killed = threading.Event()

    def first_process() -> None:
        control = SocketControl(("127.0.0.1", port), find_secret(), SOON)
        name = control.register_rank("world", 1, 3, "the first process of rank 1")
        control.join(Group.world(1, 3, name))
        cut(control)
        control.close()
        killed.set()

    def second_process() -> Rendezvous:
        assert killed.wait(SOON)
        return find(url, 1, 3, SOON)

    def last() -> Rendezvous:
        assert killed.wait(SOON)
        return find(url, 2, 3, SOON)

    _, *places = run_concurrently(first_process, lambda: find(url, 0, 3, SOON), second_process, last)
    assert [place.rank for place in places] == [0, 1, 2]
    for place in places:
        place.close()


def test_lost_rank_that_does_not_come_again_is_named(port: int) -> None:
    def killed() -> None:
        control = SocketControl(("127.0.0.1", port), find_secret(), SOON)
        control.join(Group.world(1, 3, control.register_rank("world", 1, 3, "another process")))
        cut(control)
        control.close()

    found, _ = run_concurrently(lambda: find(f"tcp://127.0.0.1:{port}", 0, 3, 0.5), killed)
    assert "for rank 1 (and 2), which have not arrived" in str(found)
    assert "rank 1 had joined, and was lost: its process ended before all had joined" in str(found)


def test_rank_that_is_lost_at_a_later_init_is_named(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    first = meet(url, 2)

    def lost() -> None:
        control = SocketControl(("127.0.0.1", port), find_secret(), SOON)
        control.join(Group.world(1, 2, control.register_rank("world", 1, 2, "a new process of rank 1")))
        cut(control)
        control.close()

    first[1].close()
    lost()
    with pytest.raises(CommTimeoutError, match="rank 1 had joined, and was lost: its process ended before all had"):
        find(url, 0, 2, 0.5)
    first[0].close()


HOST = """
    import sys
    from unisono.bootstrap import find
    find(sys.argv[1], 0, 3, 20.0)
"""


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_rank_0_is_killed_while_others_gather_and_comes_again(
    start: Start, tmp_path: Path, port: int, method: str
) -> None:
    url = f"tcp://127.0.0.1:{port}" if method == "tcp" else f"file://{tmp_path}/meet"
    host = start(HOST, url)
    seated = threading.Event()
    real = SocketControl.register_rank

    def watched(self: SocketControl, *arguments: Any) -> str:
        name = real(self, *arguments)
        seated.set()
        return name

    def again() -> Rendezvous:
        assert seated.wait(SOON)
        host.kill()
        host.wait(SOON)
        return find(url, 0, 3, SOON)

    def last() -> Rendezvous:
        assert seated.wait(SOON)
        return find(url, 2, 3, SOON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketControl, "register_rank", watched)
        places = run_concurrently(again, lambda: find(url, 1, 3, SOON), last)
    assert [place.rank for place in places] == [0, 1, 2]
    for place in places:
        place.close()


def test_hosting_process_waits_for_the_others(start: Start, port: int) -> None:
    host = start(
        """
        import sys
        from unisono.bootstrap import find
        place = find(f"tcp://127.0.0.1:{sys.argv[1]}", 0, 2, 20.0)
        raise ValueError("no data")
        """,
        port,
    )
    place = find(f"tcp://127.0.0.1:{port}", 1, 2, SOON)
    group = Group.world(1, 2, place.name)
    cause = place.control.first_cause(group, SOON)
    assert cause is not None
    assert (cause.kind, cause.rank, cause.message) == ("PeerLostError", 0, "rank 0 failed: ValueError: no data")
    place.control.set("still", b"here")
    assert host.poll() is None
    began = time.monotonic()
    place.close()
    assert host.wait(SOON) == 1
    assert time.monotonic() - began < 4.0
