"""Ranks are held by `un.breakpoint`, looked at, stepped, let go and ended."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_until

import unisono as un
from unisono.control.debug_socket import held_processes
from unisono.core.frames import FrameChannel, Kind, within
from unisono.debugger.prompt import Prompt
from unisono.errors import AbortedError, CommError, CommTimeoutError, PeerLostError, UnavailableError
from unisono.tools.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets that have no file exist on Linux alone")

TIMEOUT_S = 1.0
BACKENDS = ["thread", "shm", "tcp", "sim"]


def training(comm: un.Communicator, folder: Path, steps: int = 30) -> int:
    """Rank 1 comes to a breakpoint in step 5."""
    own = comm.rank * 10
    total = 0
    for step in range(steps):
        tensor = torch.ones(4)
        comm.all_reduce(tensor)
        total += int(tensor.sum())
        if step == 5 and comm.rank == 1:
            tell_process(folder)
            un.breakpoint()
            own = own + 1
            own = own * 2
    return total + own


def start(backend: str, program: Any, *args: Any, ranks: int = 3, timeout: float = TIMEOUT_S) -> Any:
    if backend == "sim":
        return un.simulate(program, ranks, args=args, timeout=timeout).results
    return un.launch(program, ranks, backend, args=args, timeout=timeout)


def tell_process(folder: Path) -> None:
    """Write this rank's process to a file, which has all of it as soon as it exists."""
    part = folder / f"{os.getpid()} {threading.get_ident()}"
    part.write_text(str(os.getpid()))
    part.rename(folder / "pid")


@contextmanager
def held(
    backend: str, folder: Path, program: Any = training, **how: Any
) -> Iterator[tuple[un.debugger.Session, Future[Any]]]:
    """A job that comes to a breakpoint, and a session attached to it."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(start, backend, program, folder, **how)
        try:
            assert wait_until((folder / "pid").exists, 60.0)
            with attached(int((folder / "pid").read_text())) as session:
                yield session, job
        finally:
            assert wait_until(lambda: job.done() or end(folder))


def end(folder: Path) -> None:
    """End a job that is still held."""
    with suppress(CommError):
        un.debugger.attach(int((folder / "pid").read_text())).quit()


def attached(pid: int) -> un.debugger.Session:
    found: list[un.debugger.Session] = []

    def attach() -> bool:
        with suppress(CommError):
            found.append(un.debugger.attach(pid))
        return bool(found)

    assert wait_until(attach)
    return found[0]


def settled(session: un.debugger.Session, ranks: int) -> bool:
    """Return whether all ranks are held, or in a call."""
    states = [described["state"] for described in session.ranks().values()]
    return len(states) == ranks and "running" not in states


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.soak if name in ("tcp", "thread") else ()) for name in BACKENDS]
)
def test_ranks_are_held_past_their_timeouts_and_go_on(backend: str, tmp_path: Path) -> None:
    with held(backend, tmp_path) as (session, job):
        assert wait_until(lambda: settled(session, 3))
        assert session.reason.startswith("rank 1 has reached a breakpoint at test_session.py:")
        ranks = session.ranks()
        assert ranks[1]["state"] == "held"
        assert {ranks[rank]["function"] for rank in range(3)} == {"training"}
        assert session.evaluate_all("own, comm.rank") == {0: "(0, 0)", 1: "(10, 1)", 2: "(20, 2)"}
        assert session.evaluate(1, "print('step', step)") == "step 5\n"
        assert session.evaluate(0, "own / 0") == "ZeroDivisionError: division by zero"
        assert session.stack(2)[-1].endswith(" in training")
        line = ranks[1]["line"]
        assert session.step(1)
        assert session.ranks()[1]["line"] == line + 1
        assert session.step(1)
        assert session.evaluate(1, "own") == "11"
        if backend != "sim":
            # The other ranks wait in a call for longer than its timeout, which has to pass in real time.
            time.sleep(1.5 * TIMEOUT_S)
        session.go()
        assert job.result(20) == [30 * 12 + 0, 30 * 12 + 22, 30 * 12 + 20]


def sharing(comm: un.Communicator, folder: Path) -> float:
    shared = comm.dup()
    shared.allow_any_thread()
    tensor = torch.ones(1)
    tell_process(folder)
    un.breakpoint(comm)
    shared.all_reduce(tensor)
    tensor += 1
    shared.all_reduce(tensor)
    return tensor.item()


def test_steps_pass_a_communicator_of_any_thread(tmp_path: Path) -> None:
    with held("thread", tmp_path, sharing, ranks=1, timeout=20.0) as (session, job):
        line = session.ranks()[0]["line"]
        for passed in range(1, 4):
            assert session.step(0)
            at = "held", line + passed
            assert wait_until(lambda at=at: (session.ranks()[0]["state"], session.ranks()[0]["line"]) == at)
            assert session.evaluate(0, "shared._engine.life.phase.name") == "'HELD'"
        session.go()
        assert job.result(20) == [2.0]


def elsewhere(comm: un.Communicator, folder: Path) -> float:
    """The main thread of each rank waits for another one, which rank 1 stops at a breakpoint."""
    comm.allow_any_thread()
    tensor = torch.ones(1)

    def use() -> None:
        comm.barrier()
        if comm.rank == 1:
            tell_process(folder)
            un.breakpoint(comm)
        tensor.add_(1)
        comm.all_reduce(tensor)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    return tensor.item()


def test_rank_is_stepped_in_whichever_thread_is_held(tmp_path: Path) -> None:
    with held("thread", tmp_path, elsewhere, ranks=2, timeout=20.0) as (session, job):
        place = session.ranks()[1]
        assert (place["state"], place["function"]) == ("held", "elsewhere.<locals>.use")
        assert session.step(1)
        assert session.ranks()[1]["line"] == place["line"] + 1
        assert session.evaluate(1, "tensor.item()") == "1.0"
        assert session.step(1)
        assert session.evaluate(1, "tensor.item()") == "2.0"
        session.go()
        assert job.result(20) == [4.0, 4.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_quit_ends_every_rank(backend: str, tmp_path: Path) -> None:
    with held(backend, tmp_path) as (session, job):
        pid = int((tmp_path / "pid").read_text())
        session.quit()
        with pytest.raises(AbortedError, match="the debugger has ended the job"):
            job.result(20)
    assert wait_until(lambda: pid not in dict(held_processes()))


def late(comm: un.Communicator, folder: Path) -> list[int]:
    if comm.rank == 1:
        tell_process(folder)
        # Later than the others wait for.
        time.sleep(2 * TIMEOUT_S)
    comm.barrier()
    return comm.all_gather_object(comm.rank)


@pytest.mark.parametrize("backend", [pytest.param("thread", marks=pytest.mark.soak), "shm"])
def test_timeout_holds_the_ranks_before_it_fails(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_ON_TIMEOUT", "debug")
    with held(backend, tmp_path, late) as (session, job):
        assert " timed out in barrier: " in session.reason
        assert session.evaluate(1, "comm.rank") == "1"
        session.go()
        with pytest.raises(CommTimeoutError, match="rank 1"):
            job.result(20)


def test_ranks_that_are_held_notice_a_lost_one(tmp_path: Path) -> None:
    with held("shm", tmp_path) as (session, job):
        assert wait_until(lambda: settled(session, 3))
        os.kill(int(session.evaluate(2, "__import__('os').getpid()")), signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 2"):
            job.result(20)


def at_the_same_time(comm: un.Communicator, folder: Path) -> int:
    tell_process(folder)
    un.breakpoint(comm)
    comm.barrier()
    return comm.rank


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_come_to_a_breakpoint(backend: str, tmp_path: Path) -> None:
    with held(backend, tmp_path, at_the_same_time, timeout=20.0) as (session, job):

        def goes() -> bool:
            with suppress(CommError):
                un.debugger.attach(int((tmp_path / "pid").read_text())).go()
            return job.done()

        session.go()
        assert wait_until(goes)
        assert job.result() == [0, 1, 2]


def test_prompt(tmp_path: Path) -> None:
    commands = "ranks\nall own\nwhere\nlist\nstep\np step\nown = 7\nrank 9\nrank x\nstep_ + 1\n\nhelp\ngo\n"
    with held("thread", tmp_path) as (session, job):
        assert wait_until(lambda: settled(session, 3))
        shown = io.StringIO()
        Prompt(session, stdin=io.StringIO(commands), stdout=shown).cmdloop()
        job.result(20)
    text = shown.getvalue()
    assert "rank 1 has reached a breakpoint at test_session.py:" in text
    assert re.search(r"rank 0: (held,|in all_reduce #7 \(sum.*\)) at test_session\.py:", text)
    assert "rank 1: 10\n" in text
    assert "rank 2: 20\n" in text
    assert "->" in text
    assert "un.breakpoint()" in text
    assert "rank 1> held, at test_session.py:" in text
    assert "rank 1> 5\n" in text
    assert "rank 9 is not held on this host; [0, 1, 2] are" in text
    assert "rank takes a number, not 'x'" in text
    assert "NameError: name 'step_' is not defined" in text
    assert "Documented commands" in text


def shared(comm: un.Communicator, folder: Path) -> None:
    """Rank 1 comes to a breakpoint before collectives on communicators that do not belong to its thread alone."""
    comm.allow_any_thread()
    spare, released = comm.dup(), comm.dup()
    spare.allow_any_thread()
    released.release_thread()
    passed = 0
    with ThreadPoolExecutor(1) as pool:
        comm.barrier()
        if comm.rank == 1:
            tell_process(folder)
            un.breakpoint(comm)
        comm.barrier()
        passed = 1
        if comm.rank == 1:
            pool.submit(spare.barrier).result()
        else:
            spare.barrier()
        passed = 2
        released.barrier()
        passed = 3
        comm.barrier()
    assert passed == 3


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_step_passes_a_collective_on_communicators_of_any_thread(backend: str, tmp_path: Path) -> None:
    with held(backend, tmp_path, shared, ranks=2, timeout=20.0) as (session, job):

        def stepped(to: int) -> bool:
            """Step rank 1, and rank 0 if the collective waits for it, until rank 1 has come so far."""
            for rank in (1, 0):
                session.step(rank, 0.0)
            return session.evaluate(1, "passed") == str(to)

        for passed in (1, 2, 3):
            assert wait_until(lambda passed=passed: stepped(passed))  # type: ignore[misc]  # a default binds it
        session.go()
        job.result(20)


def inner(comm: un.Communicator, value: int) -> None:
    doubled = 2 * value
    un.breakpoint(comm)
    assert doubled


def outer(comm: un.Communicator, folder: Path) -> None:
    value = 21 + comm.rank
    # Ranks that have not joined are not held.
    comm.barrier()
    if comm.rank == 2:
        tell_process(folder)
        inner(comm, value)
    comm.barrier()


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_prompt_moves_between_the_frames_of_the_program(backend: str, tmp_path: Path) -> None:
    commands = "where\ndoubled\nup\nvalue + 1\np value + 2\nlist\nwhere\nup 5\ndown 7\ndoubled\nrank 0\nvalue\ngo\n"
    with held(backend, tmp_path, outer, timeout=20.0) as (session, job):
        assert wait_until(lambda: settled(session, 3))
        assert [line.rpartition(" in ")[2] for line in session.stack(2)] == ["outer", "inner"]
        assert session.evaluate(2, "value", up=1) == "23"
        assert "has left this frame" in session.evaluate(2, "value", up=2)
        shown = io.StringIO()
        Prompt(session, stdin=io.StringIO(commands), stdout=shown).cmdloop()
        job.result(20)
    first, *answers = [re.sub(r"\S*/", "", each) for each in shown.getvalue().split("rank 2> ")]
    assert first.startswith("rank 2 has reached a breakpoint")
    assert re.fullmatch(r"   test_session.py:\d+ in outer\n-> test_session.py:\d+ in inner\n", answers[0])
    assert answers[1] == "46\n"
    assert re.fullmatch(r"test_session.py:\d+ in outer\n", answers[2])
    assert answers[3:5] == ["24\n", "25\n"]
    assert re.search(r"->  *\d+  *inner\(comm, value\)\n", answers[5])
    assert re.fullmatch(r"-> test_session.py:\d+ in outer\n   test_session.py:\d+ in inner\n", answers[6])
    assert answers[7].endswith(" in outer\n")
    assert answers[8].endswith(" in inner\n")
    assert answers[9] == "46\n"
    assert answers[10] == "rank 0> 21\nrank 0> "


def test_backends_whose_deadlines_go_on_are_refused() -> None:
    def program(comm: un.Communicator) -> None:
        un.breakpoint(comm)

    with pytest.raises(UnavailableError, match=r"ranks are held on shm, sim, tcp, thread, on Linux.* not on gloo"):
        un.launch(program, 1, "gloo")


def test_breakpoint_finds_a_communicator_that_any_thread_may_use(tmp_path: Path) -> None:
    def program(comm: un.Communicator, folder: Path) -> None:
        comm.allow_any_thread()
        tell_process(folder)
        un.breakpoint()

    with held("thread", tmp_path, program, ranks=1) as (session, job):
        assert session.ranks()[0]["state"] == "held"
        session.go()
        job.result(20)


def test_thread_without_a_communicator_is_refused() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(CommError, match="no communicator belongs to this thread yet"):
        pool.submit(un.breakpoint).result()


def test_breakpoint_leaves_the_clock_of_python_alone(tmp_path: Path) -> None:
    before = time.monotonic
    behind_s = time.clock_gettime(time.CLOCK_MONOTONIC) - time.monotonic()
    with held("thread", tmp_path) as (session, job):
        assert wait_until(lambda: settled(session, 3))
        assert time.monotonic is before
        session.go()
        job.result(20)
    assert time.monotonic is before
    assert time.clock_gettime(time.CLOCK_MONOTONIC) - time.monotonic() - behind_s < 0.01
    assert vars(threading)["_time"] is before


@pytest.mark.parametrize("asked", [[], {}, {"do": "evaluate"}, {"do": "step", "rank": []}])
def test_wrong_requests_are_answered_by_an_error(asked: Any, tmp_path: Path) -> None:
    channel = FrameChannel()
    with held("thread", tmp_path) as (session, _), connected() as peer:
        peer.sendall(channel.encode_json(Kind.DEBUG, asked))
        answer = channel.receive(within(peer, 20.0), Kind.ANSWER)
        assert answer is not None
        assert "error" in answer.json()
        session.go()


def test_what_is_no_frame_ends_the_connection(tmp_path: Path) -> None:
    with held("thread", tmp_path) as (session, _), connected() as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert peer.recv(1000) == b""
        session.go()


@contextmanager
def connected() -> Iterator[socket.socket]:
    """A connection to this process, whose ranks are held."""
    ((pid, number),) = [each for each in held_processes() if each[0] == os.getpid()]
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20.0)
        peer.connect(f"\0unisono-debug/{pid}/{number}")
        yield peer


def test_variable_turns_breakpoints_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert un.launch(training, 2, "thread", args=(tmp_path,)) == [30 * 8, 30 * 8 + 22]


def test_interrupt_at_the_prompt_keeps_ranks_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: Prompt) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Prompt, "cmdloop", interrupted)
    with held("thread", tmp_path) as (session, job):
        assert main(["debug", str(os.getpid())]) == 0
        assert wait_until(lambda: settled(session, 3))
        session.go()
        job.result(20)


def test_command_shows_ranks_and_refuses_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held("thread", tmp_path) as (session, job):
        assert wait_until(lambda: settled(session, 3))
        assert main(["debug", str(os.getpid()), "--rank", "9"]) == 2
        assert "rank 9 is not held on this host; [0, 1, 2] are" in capsys.readouterr().err
        assert main(["debug", str(os.getpid()), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["ranks"]["1"]["state"] == "held"
        session.go()
        job.result(20)
    assert main(["debug", "1"]) == 1
    assert "process 1 is in no job whose ranks are held" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_cannot_attach(tmp_path: Path) -> None:
    lines = [
        "import os, socket, sys",
        "os.setuid(65534)",
        "peer = socket.socket(socket.AF_UNIX)",
        "peer.connect(sys.argv[1].replace('@', chr(0)))",
        'peer.sendall(b\'{"do": "ranks"}\\n\')',
        "print(peer.recv(100))",
    ]
    with held("thread", tmp_path) as (session, _):
        ((pid, number),) = [each for each in held_processes() if each[0] == os.getpid()]
        name = f"@unisono-debug/{pid}/{number}"
        command = [sys.executable, "-c", "\n".join(lines), name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        closed = ("BrokenPipeError", "ConnectionResetError")
        assert done.stdout == "b''\n" or done.stderr.strip().rpartition("\n")[2].startswith(closed)
        session.go()


SCRIPT = """
import os, pathlib, sys
import torch
import unisono as un

comm = un.init()
for step in range(1000):
    comm.all_reduce(torch.ones(4))
    if step == 5 and comm.rank == 1:
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        un.breakpoint()
"""

RUNNERS = {
    "unisono run": ["-m", "unisono", "run", "-n", "2"],
    "unisono run, forking": ["-m", "unisono", "run", "-n", "2", "--start", "fork"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "pytest": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"],
}
TEST = """
import os, pathlib
import torch
import unisono as un

def program(comm):
    for step in range(1000):
        comm.all_reduce(torch.ones(4))
        if step == 5 and comm.rank == 1:
            pathlib.Path(os.environ["HELD"]).write_text(str(os.getpid()))
            un.breakpoint()

def test_it():
    un.launch(program, 2, "shm")
"""


def left_after_quit(runner: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Start a job, end it by the command `unisono debug`, and return the processes that are left."""
    held_at = folder / "pid"
    script = folder / "test_script.py"
    script.write_text(TEST if runner == "pytest" else SCRIPT)
    command = [sys.executable, *RUNNERS[runner], str(script), *([] if runner == "pytest" else [str(held_at)])]
    env = {**os.environ, "HELD": str(held_at)}
    job = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        assert wait_until(held_at.exists, 60.0)
        attached(int(held_at.read_text())).close()
        monkeypatch.setattr(sys, "stdin", io.StringIO("all comm.rank\nquit\n"))
        said = io.StringIO()
        with redirect_stdout(said):
            # The process of the launcher, which is in no group.
            assert main(["debug", str(job.pid)]) == 0
        assert "rank 0: 0\nrank 1: 1\n" in said.getvalue()
        shown = job.communicate(timeout=300)[0].decode()
        assert job.returncode != 0
        assert "the debugger has ended the job" in shown
        wait_until(lambda: not processes_of(job.pid))
        return processes_of(job.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def processes_of(session: int) -> list[int]:
    """Processes of a session that are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_quit_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Forked ranks import torch once, and there is one process more that could be left.
    assert left_after_quit("unisono run, forking", tmp_path, monkeypatch) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runner", RUNNERS)
def test_quit_leaves_no_process_in_any_of_many_runs(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in range(17):
        folder = tmp_path / str(run)
        folder.mkdir()
        assert left_after_quit(runner, folder, monkeypatch) == []
