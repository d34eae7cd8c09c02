"""Ranks find each other, by every way there is, or learn in one sentence why they do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from unisono.bootstrap import Place, find, hosting, meeting
from unisono.control.client import SocketControl
from unisono.control.secret import find_secret
from unisono.control.server import Server
from unisono.errors import CommError, CommTimeoutError, MismatchError, PeerLostError
from unisono.group import Group

SOON = 20.0

Start = Callable[..., "subprocess.Popen[str]"]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No ranks in the environment, an own secret, and no server that outlives a test."""
    others = [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI"))]
    for name in (*VARIABLES, "UNISONO_SECRET", *others):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    for lease in list(hosting._leases.values()):
        lease.server.close()
    hosting._leases.clear()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        number: int = placeholder.getsockname()[1]
        return number


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised, all of them at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SOON * 2) for future in [pool.submit(outcome, call) for call in calls]]


def meet(method: str, size: int, timeout_s: float = SOON) -> list[Place]:
    """All ranks' places, each rank a thread."""
    places = together(*[lambda rank=rank: find(method, rank, size, timeout_s) for rank in range(size)])
    for place in places:
        if isinstance(place, Exception):
            raise place
    return places


# -- the ways --------------------------------------------------------------------------------------
def test_alone() -> None:
    place, other = find(), find()
    assert (place.rank, place.size, place.server, place.address) == (0, 1, None, "127.0.0.1")
    assert place.name != other.name
    assert place.control.exchange(Group.world(0, 1, place.name), "x", 5, 1.0) == [5]
    assert "world of one" in place.source
    place.close()
    other.close()


RANK = """
    import os, sys
    from unisono.bootstrap import find
    from unisono.group import Group

    method, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    given = () if method == "env" else (method, rank, size)

    def say(place):
        group = Group.world(place.rank, place.size, place.name)
        values = place.control.exchange(group, "hello", (place.rank, place.name), 20.0)
        print(values, place.address, place.server is not None)

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


@pytest.mark.parametrize("method", ["tcp", "file", "env"])
def test_three_processes_and_three_worlds(start: Start, tmp_path: Path, port: int, method: str) -> None:
    urls = {"tcp": f"tcp://localhost:{port}", "file": f"file://{tmp_path}/meet", "env": "env"}
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if method == "env" else {}
    ranks = [start(RANK, urls[method], rank, 3, env={**env, "RANK": str(rank)} if env else env) for rank in range(3)]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [error for _, error in said] == [""] * 3
    for rank, (lines, _) in enumerate(said):
        names = [f"{[(r, name) for r in range(3)]} 127.0.0.1 {rank == 0}" for name in ("world2", "world1")]
        assert lines.splitlines()[:2] == names
        # The server may have ended in between, and then counts anew; all ranks agree on it.
        assert lines.splitlines()[2].split("]")[0] == said[0][0].splitlines()[2].split("]")[0]
    assert not (tmp_path / "meet").exists()


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
from pathlib import Path
from unisono.bootstrap import find
from unisono.group import Group
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
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = (tmp_path / f"said {rank}").read_text()
        assert said.startswith(f"['world1', 'world2'] {rank} 2 rank {rank} of 2 by the environment, met at torchrun's")


def test_rank_0_may_be_the_last(port: int) -> None:
    connecting = threading.Event()
    real = socket.create_connection

    def watched(*arguments: Any) -> socket.socket:
        connecting.set()
        return real(*arguments)

    def first() -> Place:
        assert connecting.wait(SOON)
        return find(f"tcp://127.0.0.1:{port}", 0, 2, SOON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", watched)
        places = together(first, lambda: find(f"tcp://127.0.0.1:{port}", 1, 2, SOON))
    assert [place.rank for place in places] == [0, 1]
    for place in places:
        place.close()
        place.close()


# -- bad input -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ((), {"WORLD_SIZE": "2"}, "WORLD_SIZE is known but RANK is not"),
        ((), {"RANK": "0"}, "RANK is known but WORLD_SIZE is not"),
        ((None, 1), {}, "RANK is known but WORLD_SIZE is not"),
        (("env://",), {}, "neither RANK nor WORLD_SIZE is set"),
        ((), {"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', which is not a number"),
        ((), {"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not among 0 to 1"),
        ((), {"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 is not among"),
        ((), {"RANK": "0", "WORLD_SIZE": "0"}, "at least 1, not 0"),
        ((), {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set; set MASTER_ADDR to the host of rank 0"),
        ((), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "MASTER_PORT is not set"),
        ((), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "a"}, "MASTER_PORT is 'a'"),
        ((), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "0"}, "from 1 to 65535"),
        (("tcp://127.0.0.1:1",), {}, "pass rank and world_size too"),
        (("tcp://127.0.0.1:1", 0), {}, "pass rank and world_size too"),
        (("tcp://127.0.0.1", 0, 2), {}, "write tcp://host:port"),
        (("tcp://127.0.0.1:99999", 0, 2), {}, "write tcp://host:port"),
        (("tcp://:80", 0, 2), {}, "write tcp://host:port"),
        (("tcp://0.0.0.0:80", 0, 2), {}, "names no host that others can reach"),
        (("tcp://127.0.0.1:1", 2, 2), {}, "rank 2 is not among"),
        (("tcp://127.0.0.1:1", "0", 2), {}, "rank has to be a whole number, not '0'"),
        (("tcp://127.0.0.1:1", True, 2), {}, "rank has to be a whole number"),
        (
            ("udp://127.0.0.1:1", 0, 2),
            {},
            "unknown init_method 'udp://127.0.0.1:1'; known: env://, file://, mpi://, tcp://",
        ),
        (("127.0.0.1:1", 0, 2), {}, "unknown init_method"),
        (("file://relative/path", 0, 2), {}, "with three slashes"),
        (("file:///no/such/directory/file", 0, 2), {}, "there is no directory /no/such/directory"),
    ],
)
def test_what_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], env: dict[str, str], words: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        find(*arguments, timeout_s=1.0)


def test_unreachable_master(port: int) -> None:
    with pytest.raises(CommTimeoutError, match=f"rank 1 of 2, init: nobody answers at 127.0.0.1:{port} after 0.3 s"):
        find(f"tcp://127.0.0.1:{port}", 1, 2, 0.3)


def test_occupied_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CommError, match=f"cannot listen at 127.0.0.1:{port}: .* taken by another program"):
            find(f"tcp://127.0.0.1:{port}", 0, 2, 1.0)


def test_missing_ranks_are_named(port: int) -> None:
    with pytest.raises(CommTimeoutError, match=r"waited 0.\d s in init for rank 1 \(and 2\), which have not come"):
        find(f"tcp://127.0.0.1:{port}", 0, 3, 0.3)


def test_wrong_secret(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    outcomes = together(lambda: find(url, 0, 2, 1.0, "one"), lambda: find(url, 1, 2, SOON, "two"))
    assert isinstance(outcomes[0], CommTimeoutError)
    assert "the secrets differ: set UNISONO_SECRET" in str(outcomes[1])


@pytest.fixture
def as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call pass for a process of its own."""
    monkeypatch.setattr(meeting, "_process", lambda number: uuid.uuid4().hex)


@pytest.mark.usefixtures("as_processes")
def test_two_processes_with_one_rank(port: int) -> None:
    outcomes = together(*[lambda rank=rank: find(f"tcp://127.0.0.1:{port}", rank, 3, SOON) for rank in (0, 1, 1)])
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 3
    assert all("two processes claim to be rank 1" in str(outcome) for outcome in outcomes)


@pytest.mark.usefixtures("as_processes")
def test_a_late_double_is_refused_alone(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    places = meet(url, 2)
    late = together(lambda: find(url, 1, 2, SOON))[0]
    assert isinstance(late, MismatchError)
    values = together(*[lambda p=p: p.control.agree(Group.world(p.rank, 2, p.name), "x", 1, SOON) for p in places])
    assert values == [None, None]
    for place in places:
        place.close()


def test_different_sizes(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    outcomes = together(lambda: find(url, 0, 2, SOON), lambda: find(url, 1, 3, SOON))
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 2
    assert all("start all of them with the same number" in str(outcome) for outcome in outcomes)


# -- ends ------------------------------------------------------------------------------------------
def test_rank_0_may_close_first(port: int) -> None:
    places = meet(f"tcp://127.0.0.1:{port}", 2)
    server = places[0].server
    assert server is not None
    places[0].close()
    places[1].control.set("still", b"here")
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        places[1].control.exchange(Group.world(1, 2, places[1].name), "x", 1, SOON)
    places[1].close()
    server._thread.join(SOON)
    assert not server._thread.is_alive()


def test_a_server_that_ends_while_ranks_gather_is_followed_by_the_next(port: int) -> None:
    old = Server(find_secret(), "127.0.0.1", port)
    seated = threading.Event()
    real = SocketControl.enrol

    def watched(self: SocketControl, *arguments: Any) -> str:
        name = real(self, *arguments)
        seated.set()
        return name

    def first() -> Place:
        assert seated.wait(SOON)
        old.close()
        return find(f"tcp://127.0.0.1:{port}", 0, 2, SOON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketControl, "enrol", watched)
        places = together(first, lambda: find(f"tcp://127.0.0.1:{port}", 1, 2, SOON))
    assert [place.rank for place in places] == [0, 1]
    for place in places:
        place.close()


def test_a_process_that_hosts_waits_for_the_others_at_its_end(start: Start, port: int) -> None:
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
    cause = place.control.cause(group, SOON)
    assert cause is not None
    assert (cause.kind, cause.rank, cause.message) == ("PeerLostError", 0, "rank 0 failed: ValueError: no data")
    place.control.set("still", b"here")
    assert host.poll() is None
    began = time.monotonic()
    place.close()
    assert host.wait(SOON) == 1
    assert time.monotonic() - began < 4.0
