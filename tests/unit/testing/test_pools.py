"""A pool's ranks serve many programs, tell what went wrong, and leave nothing behind."""

from __future__ import annotations

import importlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import unisono as un
from unisono.errors import CommTimeoutError, MismatchError, PeerLostError
from unisono.testing import RankPool, pool, run_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(3, "gloo") as made:
        yield made


@dataclass
class Point:
    """A class that ranks cannot import."""

    x: int


def total(comm: un.Communicator, x: float = 1.0) -> float:
    t = torch.tensor([x])
    comm.all_reduce(t)
    return t.item()


def who(comm: un.Communicator) -> tuple[int, int]:
    return os.getpid(), comm.rank


def test_ranks_are_reused(ranks: RankPool) -> None:
    first, second = ranks.run(who), ranks.run(who)
    assert first == second
    assert len({pid for pid, _ in first}) == 3
    assert [rank for _, rank in first] == [0, 1, 2]


def test_programs_get_the_requested_number_of_ranks(ranks: RankPool) -> None:
    for size in (1, 2, 3, 2, 1):
        assert ranks.run(total, 2.0, size=size) == [2.0 * size] * size
    for size in (0, 4):
        with pytest.raises(ValueError, match=f"size={size}, but this pool has 3 ranks"):
            ranks.run(total, size=size)


def test_unimportable_function_is_sent_by_value(ranks: RankPool) -> None:
    offset = 10
    assert ranks.run(lambda comm, point: Point(point.x + comm.rank + offset), Point(1), size=2) == [
        Point(11),
        Point(12),
    ]


def test_error_is_raised_with_rank_and_traceback(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("my mistake")
        comm.barrier()

    before = ranks.run(who)
    with pytest.raises(KeyError, match="my mistake") as caught:
        ranks.run(program)
    assert "raised on rank 1 of 3" in caught.value.__notes__
    assert "in program" in "".join(traceback.format_tb(caught.value.__traceback__))
    # The barrier was not the same on all ranks, so they get a new communicator.
    assert ranks.run(total) == [3.0] * 3
    assert ranks.run(total, size=2) == [2.0] * 2
    assert ranks.run(who) == before


def test_error_of_communication_replaces_the_ranks(ranks: RankPool) -> None:
    before = ranks.run(who)
    with pytest.raises(MismatchError):
        ranks.run(lambda comm: comm.all_reduce(torch.ones(1 + comm.rank)))
    after = ranks.run(who)
    assert not {pid for pid, _ in before} & {pid for pid, _ in after}


def test_changed_environment_and_folder_reach_the_ranks(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNISONO_TESTED", "yes")
    monkeypatch.chdir(tmp_path)
    here = [("yes", str(tmp_path))] * 2
    assert ranks.run(lambda comm: (os.environ["UNISONO_TESTED"], str(Path.cwd())), size=2) == here


def test_programs_find_the_random_generator_as_new(ranks: RankPool) -> None:
    def drawn(comm: un.Communicator) -> float:
        return torch.rand(1).item()

    assert ranks.run(drawn, size=2) == ranks.run(drawn, size=2)


def test_on_failure_continue_returns_errors_in_place(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> str:
        if comm.rank == 0:
            raise KeyError("my mistake")
        return "fine"

    ends = ranks.run(program, on_failure="continue")
    assert isinstance(ends[0], KeyError)
    assert ends[1:] == ["fine", "fine"]


def test_killed_rank_is_reported(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(PeerLostError, match="rank 2 of 3 was ended by SIGKILL"):
        ranks.run(program)
    assert ranks.run(total) == [3.0] * 3


@pytest.mark.parametrize("size", [1, 3])
def test_rank_that_ended_between_programs_is_reported(size: int) -> None:
    with RankPool(3, "gloo") as ranks:
        pid, _ = ranks.run(who)[2]
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([handle], [], [], 10)[0]
        os.close(handle)
        with pytest.raises(PeerLostError, match="rank 2"):
            ranks.run(total, size=size)
        assert ranks.run(total, size=size) == [size] * size


def test_unpicklable_result_is_explained(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="the result of rank 0, frame, cannot be sent back"):
        ranks.run(lambda comm: sys._getframe(), size=1)

    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("text")
            self.frame = sys._getframe()

    def program(comm: un.Communicator) -> None:
        raise OddError(1, 2)

    with pytest.raises(RuntimeError, match="OddError: text"):
        ranks.run(program, size=1)


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_hanging_program_is_ended_and_reported(backend: str) -> None:
    def for_ever(comm: un.Communicator) -> None:
        hangs = comm.rank == 1
        while hangs:
            time.sleep(0.01)

    with RankPool(2, backend, limit_s=1.0) as ranks:
        with pytest.raises(CommTimeoutError, match=r"did not end within 1 s on rank 1(.|\n)*in for_ever") as caught:
            ranks.run(for_ever)
        assert str(Path(un.__file__).parent) not in str(caught.value)
        assert ranks.run(total) == [2.0] * 2


def test_programs_that_are_ended_while_they_import_leave_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 imports when they are ended, and the others wait for it; afterwards one is in an endless loop."""
    gate: Any = ModuleType("gate")
    gate.opened = threading.Event()
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text("import gate\ngate.opened.wait(30)\n")
    threads: list[threading.Thread] = []

    def imports(comm: un.Communicator, hangs: int | None) -> str:
        threads.append(threading.current_thread())
        module = importlib.import_module("slow_to_import")
        while comm.rank == hangs:
            time.sleep(0.01)
        return module.__name__

    with RankPool(3, "thread", limit_s=0.5) as ranks, pytest.raises(CommTimeoutError, match="on ranks 0, 1, 2"):
        ranks.run(imports, 1)
    gate.opened.set()
    with RankPool(3, "thread", limit_s=20) as ranks:
        assert ranks.run(imports, None) == ["slow_to_import"] * 3
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_interrupted_driver_learns_where_ranks_are(backend: str) -> None:
    def for_ever(comm: un.Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            os.kill(driver, signal.SIGALRM)
        while True:
            time.sleep(0.01)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    driver, before = os.getpid(), signal.signal(signal.SIGALRM, interrupt)
    try:
        with RankPool(2, backend) as ranks:
            with pytest.raises(KeyboardInterrupt) as caught:
                ranks.run(for_ever)
            (note,) = caught.value.__notes__
            assert re.match(r"Rank 0 was at:\n(.|\n)* in for_ever(.|\n)*Rank 1 was at:\n(.|\n)* in for_ever", note)
            assert ranks.run(total) == [2.0] * 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_driver_may_be_interrupted_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has begun when the driver is interrupted, and rank 1 begins afterwards: both end."""
    held, running, left = threading.Event(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    driver, start = threading.current_thread(), threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if threading.current_thread() is driver:
            assert running.wait(60.0)
            raise KeyboardInterrupt

    def hold_up(comm: un.Communicator) -> un.Communicator:
        threads.append(threading.current_thread())
        if comm.rank == 1:
            held.set()
            left.wait(60.0)
        held.wait(60.0)
        return comm

    def for_ever(comm: un.Communicator) -> None:
        if comm.rank == 0:
            running.set()
        while True:
            time.sleep(0.01)

    with RankPool(2, "thread") as ranks:
        monkeypatch.setattr(un.Communicator, "__enter__", hold_up)
        monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            ranks.run(for_ever)
        monkeypatch.undo()
        left.set()
        (note,) = caught.value.__notes__
        assert " in for_ever" in note
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        assert ranks.run(total) == [2.0] * 2


def test_driver_may_be_interrupted_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def send_once(link: Connection, data: bytes) -> None:
        if sent:
            raise KeyboardInterrupt
        sent.append(data)
        send(link, data)

    def for_ever(comm: un.Communicator) -> None:
        while True:
            time.sleep(0.01)

    send = Connection.send_bytes
    with RankPool(2, "gloo") as ranks:
        pids = [pid for pid, _ in ranks.run(who)]
        monkeypatch.setattr(Connection, "send_bytes", send_once)
        with pytest.raises(KeyboardInterrupt) as caught:
            ranks.run(for_ever)
        monkeypatch.undo()
        assert "Rank 0 was at:" in caught.value.__notes__[0]
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert ranks.run(total) == [2.0] * 2


def test_ranks_that_cannot_start_report_why() -> None:
    with pytest.raises(un.errors.UnavailableError, match="use "):
        RankPool(2, "ucc").run(total)


def test_threads_need_no_start() -> None:
    with RankPool(3, "thread") as ranks:
        assert ranks.run(total) == [3.0] * 3
        assert ranks.run(total, size=2) == [2.0] * 2
        assert len({pid for pid, _ in ranks.run(who)}) == 1


def test_closed_pool_leaves_no_process_and_is_reusable() -> None:
    ranks = RankPool(2, "gloo")
    pids = [pid for pid, _ in ranks.run(who)]
    ranks.close()
    ranks.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert ranks.run(total) == [2.0] * 2
    ranks.close()


def test_pools_are_kept_by_their_arguments() -> None:
    assert pool("thread", 4) is pool("thread", 4)
    assert pool("thread", 4) is not pool("thread", 2)
    assert pool("thread", 4) is not pool("thread", 4, chunk_bytes=64)
    assert pool("thread", 4, hosts=[[0, 1], [2, 3]]) is pool("thread", 4, hosts=[[0, 1], [2, 3]])


def test_least_recently_used_pool_ends_its_ranks() -> None:
    first = pool("gloo", 1)
    ((pid, _),) = first.run(who)
    for size in range(2, 10):
        pool("thread", size)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert pool("gloo", 1) is not first


@pytest.mark.soak
def test_ranks_end_with_their_process() -> None:
    program = """
        import os
        from unisono.testing import pool
        print(*pool("gloo", 2).run(lambda comm: os.getpid()))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    for pid in map(int, done.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_run_ranks_passes_arguments_and_options() -> None:
    def program(comm: un.Communicator, x: int, y: int) -> int:
        return comm.rank + x + y

    assert run_ranks(program, 2, "thread", 10, 100) == [110, 111]
    with pytest.raises(CommTimeoutError, match="rank 1"):
        # Rank 1 is busy elsewhere meanwhile.
        run_ranks(lambda comm: comm.recv(torch.ones(1), 0, timeout=5) if comm.rank else comm.barrier(), 2, timeout=0.1)
    with pytest.raises(ValueError, match=r"unknown transport 'threads'; known: .*thread"):
        run_ranks(program, 2, "threads")
