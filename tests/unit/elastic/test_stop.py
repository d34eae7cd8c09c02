"""All ranks stop at the same step: requests of any rank at any time, signals, deadlines, files; what is saved then."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.testing import pool

SAVED, UNSAVED = 75, 74
STEPS = 150
Found = tuple[int, str | None, int, list[float]]


def trained(comm: un.Communicator, seed: int, path: str) -> Found:
    """Train from the last checkpoint on; a rank that the seed draws requests a stop at a moment that it draws."""
    chance = random.Random(seed)
    asks, when = chance.randrange(comm.size), chance.randrange(1, 20)
    weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    un.GradientAverager([weight], comm)
    state = {"weight": weight, "step": 0}
    with un.checkpoint.Checkpointer(path, comm, every=10, save_on_stop=True) as checkpointer:
        done = checkpointer.load(state) or 0
        for step in un.stop.batches(comm, range(done + 1, STEPS + 1)):
            if comm.rank == asks and step == done + when:
                if comm.backend == "sim":  # Its ranks run in turn, in threads of its own.
                    comm.request_stop(f"seed {seed}")
                else:
                    threading.Thread(target=comm.request_stop, args=(f"seed {seed}",)).start()
            weight.grad = None
            (weight * (comm.rank + 1) * step).sum().backward()
            with torch.no_grad():
                weight -= weight.grad  # type: ignore[operator]
            state["step"] = step
            checkpointer.step(step, state)
    return int(state["step"]), comm.stop_reason, un.stop.exit_status(comm), weight.tolist()  # type: ignore[call-overload]


def stop_and_resume(backend: str, sizes: list[int], folder: Path) -> None:
    """Stop a training again and again. Each checkpoint is whole, and of the step at which all ranks have stopped."""
    before = total = 0.0
    for seed, size in enumerate(sizes):
        if backend == "sim":
            found: list[Found] = un.simulate(trained, size, seed=seed, args=(seed, str(folder))).results
        else:
            found = pool(backend, size).run(trained, seed, str(folder))
        assert found == [found[0]] * size
        step, reason, status, weights = found[0]
        assert (reason, status) == (f"seed {seed}", SAVED)
        assert un.checkpoint.verify(folder / f"step-{step:010d}")
        total -= (1 + size) / 2 * sum(range(int(before) + 1, step + 1))
        assert weights == [total] * 3
        before = step


@pytest.mark.parametrize(
    ("backend", "count"),
    [
        ("thread", 4),
        ("shm", 2),
        pytest.param("sim", 500, marks=pytest.mark.soak),
        pytest.param("thread", 200, marks=pytest.mark.soak),
        *[pytest.param(backend, 20, marks=pytest.mark.soak) for backend in ("shm", "tcp", "gloo")],
    ],
)
def test_stopped_trainings_resume_where_they_stopped(backend: str, count: int, tmp_path: Path) -> None:
    for part in range(0, count, 6):
        sizes = [2 + number % 3 if count > 3 else 2 for number in range(part, min(part + 6, count))]
        stop_and_resume(backend, sizes, tmp_path / f"{part}")


def alone(comm: un.Communicator, seed: int) -> tuple[int, str | None]:
    """A loop without collectives, in which ranks are far apart: each does a different amount of work in a step."""
    chance = random.Random(seed * 100 + comm.rank)
    steps = 0
    when = chance.randrange(1, 60)
    while not comm.stop_requested():
        steps += 1
        if steps == when:
            comm.request_stop(f"rank {comm.rank}")
        torch.ones(chance.randrange(1, 1000)).cumsum(0)
    return steps, comm.stop_reason


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 540), marks=pytest.mark.soak)])
def test_simulated_ranks_stop_at_the_same_step(seeds: range) -> None:
    for seed in seeds:
        found = un.simulate(alone, 2 + seed % 3, seed=seed, args=(seed,)).results
        assert found == [found[0]] * len(found)


@pytest.mark.parametrize(("backend", "count"), [("thread", 10), pytest.param("shm", 10, marks=pytest.mark.soak)])
def test_ranks_without_collectives_stop_at_the_same_step(backend: str, count: int) -> None:
    for seed in range(count):
        found = pool(backend, 3).run(alone, seed)
        assert found == [found[0]] * 3


def uneven(comm: un.Communicator) -> list[tuple[int, str | None]]:
    """Rank 1 has fewer batches, and a stop is requested when it has finished; or before."""
    found = []
    for asks_at in (6, 2):
        part = comm.dup()
        weight = torch.zeros(1, requires_grad=True)
        averager = un.GradientAverager([weight], part)
        done = 0
        with averager.join():
            for step in un.stop.batches(part, range(4 if part.rank else 9)):
                if part.rank == 0 and step == asks_at:
                    part.request_stop("joined")
                weight.sum().backward()
                done += 1
        found.append((done, part.stop_reason))
        part.close()
    return found


@pytest.mark.parametrize("backend", ["thread", "sim"])
def test_ranks_in_join_stop_with_the_others(backend: str) -> None:
    (first, others), (second, both) = zip(*un.launch(uneven, 2, backend), strict=True)
    assert first == (7, "joined")
    assert others == (4, "joined")
    assert second == both == (3, "joined")


def next_loop(comm: un.Communicator) -> tuple[int, int]:
    """A request that finds no step left in a loop of uneven lengths stops the next loop at the same step."""
    weight = torch.zeros(1, requires_grad=True)
    averager = un.GradientAverager([weight], comm)
    with averager.join():
        for _ in un.stop.batches(comm, range(2 + comm.rank)):
            weight.sum().backward()
    if comm.rank == 0:
        comm.request_stop()
    comm.barrier()
    steps = sum(1 for _ in un.stop.batches(comm, range(100)))
    return steps, boundaries_passed(comm)


def boundaries_passed(comm: un.Communicator) -> int:
    from unisono.communicator import boundaries_of

    return boundaries_of(comm).passed


def test_counts_are_equal_after_loops_of_different_lengths() -> None:
    found = un.launch(next_loop, 3, "thread")
    assert found == [(0, 5 + 1)] * 3


def dying(comm: un.Communicator) -> str:
    if comm.rank == 1:
        comm.request_stop("before the end")
        raise RuntimeError("rank 1 ends here")
    try:
        while not comm.stop_requested():
            comm.barrier()
    except un.CommError as error:
        return type(error).__name__
    return "stopped"


@pytest.mark.parametrize("backend", ["thread", pytest.param("shm", marks=pytest.mark.soak)])
def test_a_rank_that_fails_between_request_and_step_is_an_error(backend: str) -> None:
    found = un.launch(dying, 3, backend, on_failure="continue", timeout=20)
    assert [found[0], found[2]] == ["PeerLostError"] * 2


def rebuilding(comm: un.Communicator) -> tuple[int, str | None]:
    steps = 0
    if comm.rank == 2:
        comm.request_stop("while ranks rebuild")
        raise RuntimeError("rank 2 ends here")
    try:
        while True:
            comm.barrier()
    except un.CommError:
        comm = comm.rebuild()
    for _ in un.stop.batches(comm, range(50)):
        comm.barrier()
        steps += 1
    return steps, comm.stop_reason


def test_a_request_holds_for_the_survivors() -> None:
    found = un.launch(rebuilding, 3, "shm", on_failure="continue", timeout=20)
    assert found[:2] == [found[0]] * 2
    assert found[0][1] == "while ranks rebuild"


def requesting_later(comm: un.Communicator, folder: str) -> tuple[int, str | None, int]:
    """A loop that goes on with the communicator that it began with, whose ranks rebuild it; and stop and save then."""
    if comm.rank == 2:
        raise RuntimeError("rank 2 ends here")
    current = comm
    done = 0
    with un.checkpoint.Checkpointer(folder, comm, every=100, save_on_stop=True) as checkpointer:
        for step in un.stop.batches(comm, range(50)):
            try:
                current.barrier()
            except un.CommError:
                current = current.rebuild()
            if step == 5 and comm.rank == 0:
                comm.request_stop("after the rebuild")
            done += 1
            current.barrier()
            checkpointer.step(done, {"done": done})
    return done, comm.stop_reason, un.stop.exit_status(comm)


def test_a_request_to_a_communicator_that_was_rebuilt_is_made_to_the_new_one(tmp_path: Path) -> None:
    found = un.launch(requesting_later, 3, "thread", args=(str(tmp_path),), on_failure="continue", timeout=20)
    assert found[:2] == [(6, "after the rebuild", SAVED)] * 2


def test_sources_follow_to_the_rebuilt_communicator(tmp_path: Path) -> None:
    comm = un.init()
    un.stop.enable(comm, [], file=tmp_path / "stop")
    comm = comm.rebuild()  # Nothing else refers to the one before.
    (tmp_path / "stop").touch()
    for _ in un.stop.batches(comm, iter(int, 1)):
        pass
    assert comm.stop_reason == f"the file {tmp_path / 'stop'} exists"
    comm.close()


def test_a_request_is_repeated_until_the_control_plane_receives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    request = un.Communicator.request_stop
    failures = [un.errors.CommTimeoutError("busy", waited_s=1.0)]

    def failing(self: un.Communicator, reason: str) -> None:
        if failures:
            raise failures.pop()
        request(self, reason)

    monkeypatch.setattr(un.Communicator, "request_stop", failing)
    monkeypatch.setattr("unisono.elastic.stop._LOOK_EVERY_S", 0.01)
    with un.init() as comm, un.stop.enable(comm, [signal.SIGUSR2]):
        os.kill(os.getpid(), signal.SIGUSR2)
        for _ in un.stop.batches(comm, iter(int, 1)):
            pass
        assert comm.stop_reason == "signal SIGUSR2"


# -- signals, deadlines, files ---------------------------------------------------------------------
def test_a_signal_requests_a_stop_and_other_handlers_are_called_too() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with un.init() as comm, un.stop.enable(comm, [signal.SIGUSR2]):
            os.kill(os.getpid(), signal.SIGUSR2)
            for _ in un.stop.batches(comm, iter(int, 1)):
                pass
            assert comm.stop_reason == "signal SIGUSR2"
        assert heard == [signal.SIGUSR2]
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_of_the_users_stays_where_none_was_asked_for() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with un.init() as comm:
            for _ in un.stop.batches(comm, range(2)):
                assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_deadlines_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.elastic.stop._LOOK_EVERY_S", 0.01)
    step = threading.Event()  # what a step takes
    with un.init() as comm, un.stop.enable(comm, [], after_s=0):
        for _ in un.stop.batches(comm, iter(int, 1)):
            step.wait(0.01)
        assert comm.stop_reason == "0 s have passed"
    with un.init() as comm, un.stop.enable(comm, [], file=tmp_path / "stop"):
        for _ in un.stop.batches(comm, iter(int, 1)):
            (tmp_path / "stop").touch()
            step.wait(0.01)
        assert comm.stop_reason == f"the file {tmp_path / 'stop'} exists"
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    with un.init() as comm:
        for _ in un.stop.batches(comm, iter(int, 1)):
            step.wait(0.01)
        assert "time limit of the Slurm job" in str(comm.stop_reason)


def test_a_forked_process_ends_by_the_signal() -> None:
    with un.init() as comm, un.stop.enable(comm, [signal.SIGTERM]):
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            # Python drops signals that arrive before it has returned from fork.
            os.write(writes, b"x")
            time.sleep(60)
        os.read(reads, 1)
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + 10
        ended = 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert comm.stop_reason is None


def test_closed_sources_leave_the_signal_to_the_handler_before() -> None:
    heard: list[int] = []
    mine = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with un.init() as first, un.init() as second:
            early, late = (un.stop.enable(comm, [signal.SIGUSR2]) for comm in (first, second))
            early.close()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert heard == [signal.SIGUSR2]
            # Only the main thread can remove a handler.
            closing = threading.Thread(target=late.close)
            closing.start()
            closing.join()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2] * 2
        assert first.stop_reason is second.stop_reason is None
    finally:
        signal.signal(signal.SIGUSR2, mine)


def test_a_second_signal_while_ranks_close_does_not_end_them() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        for _ in range(2):
            with un.init() as comm, un.stop.enable(comm, [signal.SIGUSR2]):
                os.kill(os.getpid(), signal.SIGUSR2)
                for _ in un.stop.batches(comm, iter(int, 1)):
                    pass
            # A scheduler and a launcher may both send it. By default, it ends a process.
            os.kill(os.getpid(), signal.SIGUSR2)
            assert comm.stop_reason == "signal SIGUSR2"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_wrong_sources_are_refused() -> None:
    def in_a_thread(comm: un.Communicator) -> None:
        un.stop.enable(comm, [signal.SIGTERM])

    with pytest.raises(RuntimeError, match=re.escape("comm.request_stop(reason)")):
        un.launch(in_a_thread, 2, "thread")
    with un.init() as comm:
        with pytest.raises(ValueError, match="after_s must be a number of seconds, not -1"):
            un.stop.enable(comm, after_s=-1)
        with pytest.raises(ValueError, match="0 is not a valid Signals"):
            un.stop.enable(comm, [0])
        before = signal.getsignal(signal.SIGWINCH)
        with pytest.raises(ValueError, match="SIGKILL cannot request a stop"):
            un.stop.enable(comm, [signal.SIGWINCH, signal.SIGKILL])
        assert signal.getsignal(signal.SIGWINCH) is before


ENDLESS = """
import signal, sys, unisono as un
with un.init() as comm:
    print("ready", flush=True)
    with un.stop.enable(comm, [signal.SIGTERM]):
        for line in sys.stdin:
            pass
"""


def test_a_second_signal_is_for_the_handler_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(number: int, frame: object) -> None:
        heard.append(number)

    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, mine)
    try:
        with un.init() as comm, un.stop.enable(comm, [signal.SIGUSR2]):
            os.kill(os.getpid(), signal.SIGUSR2)
            monkeypatch.setattr("unisono.elastic.stop._DUPLICATE_S", 0.0)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) is mine
        assert heard == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.soak
def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        ended = False
        # The first ones are taken for one, as a launcher and a scheduler send it.
        while not ended:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(0.3)
            except subprocess.TimeoutExpired:
                continue
            ended = True
    assert process.returncode == -signal.SIGTERM


# -- what is saved ---------------------------------------------------------------------------------
def test_the_exit_status_tells_what_is_saved(tmp_path: Path) -> None:
    def run(save_at: set[int], *, save_on_stop: bool = False) -> int:
        with un.init() as comm:
            checkpointer = un.checkpoint.Checkpointer(tmp_path, comm, every=1000, save_on_stop=save_on_stop)
            with checkpointer:
                for step in un.stop.batches(comm, range(10)):
                    if step in save_at:
                        checkpointer.save(step, {"step": step})
                    else:
                        checkpointer.step(step + 1, {"step": step})
                    if step == 5:
                        comm.request_stop()
        return un.stop.exit_status(comm)

    assert run(set()) == UNSAVED
    assert run({4}) == UNSAVED
    assert run({4, 5}) == SAVED
    assert run({4}, save_on_stop=True) == SAVED


@pytest.mark.parametrize("asks_before_evaluation", [False, True])
def test_a_stop_between_epochs_is_of_the_last_step(tmp_path: Path, *, asks_before_evaluation: bool) -> None:
    with un.init() as comm, un.checkpoint.Checkpointer(tmp_path, comm, save_on_stop=True) as checkpointer:
        for epoch in range(3):
            for step in un.stop.batches(comm, range(4)):
                checkpointer.step(4 * epoch + step, {"step": step})
            if asks_before_evaluation:
                comm.stop_requested()
            if epoch == 1:
                comm.request_stop()
    assert checkpointer.steps() == [5, 6, 7]
    assert un.stop.exit_status(comm) == SAVED


def test_a_save_that_failed_is_not_taken_for_the_last_step(tmp_path: Path) -> None:
    with un.init() as comm:
        checkpointer = un.checkpoint.Checkpointer(tmp_path, comm, background=False, save_on_stop=True)
        checkpointer.step(1, {"step": 1})
        comm.stop_requested()
        checkpointer._storage = checkpointer._storage.child("file")
        (tmp_path / "file").touch()
        with pytest.raises(un.checkpoint.CheckpointError):
            checkpointer.step(2, {"step": 2})
        comm.request_stop()
        while not comm.stop_requested():
            pass
        with suppress(un.checkpoint.CheckpointError):
            checkpointer.close()
    assert un.stop.exit_status(comm) == UNSAVED


def saved_beside(comm: un.Communicator, folder: str) -> bool:
    """Save while a call of the same communicator is in flight: rank 1 is late for it."""
    with un.checkpoint.Checkpointer(folder, comm) as checkpointer:
        if comm.rank == 1:
            time.sleep(0.3)
        work = comm.all_reduce(torch.ones(1 << 22), async_op=True)
        checkpointer.save(1, {"step": 1})
        work.wait()
    return checkpointer.steps() == [1]


@pytest.mark.soak
def test_a_save_beside_a_call_in_flight(tmp_path: Path) -> None:
    assert un.launch(saved_beside, 2, "shm", args=(str(tmp_path),), timeout=30) == [True, True]


def test_without_a_stop_the_status_is_0() -> None:
    with un.init() as comm:
        assert list(un.stop.batches(comm, range(3))) == [0, 1, 2]
        assert comm.stop_reason is None
    assert un.stop.exit_status(comm) == 0


def test_a_training_that_ends_unsaved_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "unisono.checkpoint")
    with un.checkpoint.Checkpointer(tmp_path, every=80) as checkpointer:
        for step in range(160, 169):
            checkpointer.step(step, {"step": step})
    assert [record.getMessage() for record in caplog.records] == [UNSAVED_TEXT]
    caplog.clear()
    with un.checkpoint.Checkpointer(tmp_path, every=80) as checkpointer:
        checkpointer.step(168, {"step": 168})
        checkpointer.save(168, {"step": 168})
    assert not caplog.records

    def program(comm: un.Communicator) -> None:
        with un.checkpoint.Checkpointer(tmp_path, comm, every=80) as checkpointer:
            checkpointer.step(168, {"step": 168})

    un.launch(program, 2, "thread")
    assert [record.getMessage() for record in caplog.records] == [UNSAVED_TEXT], "once for all ranks"


UNSAVED_TEXT = "step 168 is the last, and is not saved: every=80. Call save() at the end"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("what", ["state", "step", "call"])
def test_a_save_at_different_steps_names_the_module(tmp_path: Path, what: str, *, background: bool) -> None:
    def program(comm: un.Communicator) -> str:
        odd = comm.rank == 1
        try:
            with un.checkpoint.Checkpointer(tmp_path, comm, background=background) as checkpointer:
                if odd and what == "call":
                    comm.all_reduce(torch.ones(2))
                else:
                    checkpointer.save(1 + (odd and what == "step"), {"step": odd and what == "state"})
        except un.errors.MismatchError as error:
            return "\n".join([str(error), *getattr(error, "__notes__", ())])
        return "saved"

    first, second = un.launch(program, 2, "thread", on_failure="continue")
    assert first.count("un.stop") == 1
    assert second.count("un.stop") == (what != "call")


def test_a_save_inside_another_names_the_module(tmp_path: Path) -> None:
    class Handled:
        """What a signal handler does while its value is saved."""

        def state_dict(self) -> dict[str, int]:
            checkpointer.save(1, {})
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with un.init() as comm:
        checkpointer = un.checkpoint.Checkpointer(tmp_path, comm, background=False)
        with pytest.raises(un.checkpoint.CheckpointError, match=re.escape("with un.stop, and save there")):
            checkpointer.save(1, {"handled": Handled()})
        checkpointer.save(2, {})
    assert checkpointer.steps() == [2]


# -- communicators that have ended -----------------------------------------------------------------
@pytest.mark.parametrize(
    "call",
    [
        un.Communicator.stop_requested,
        un.Communicator.request_stop,
        un.stop.enable,
        lambda comm: next(un.stop.batches(comm, [1])),
    ],
)
@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_closed_communicator_is_an_error(call: Callable[[un.Communicator], object], *, rebuilt: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with un.init() as comm:
        if rebuilt:
            comm.rebuild()
    with pytest.raises(un.errors.ClosedError, match="the communicator is closed"):
        call(comm)
    assert signal.getsignal(signal.SIGTERM) is before


def stopped_process(comm: un.Communicator) -> tuple[int | None, str]:
    """Rank 1 is stopped before it can report its step; the others name it, and so does rank 1 once it goes on."""
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 1:
        # Its control thread does not run while it is stopped, or before the others have noticed.
        comm.send(torch.ones(1), 0)
    if comm.rank == 0:
        comm.recv(torch.ones(1), 1)
        os.kill(pids[1], signal.SIGSTOP)
        comm.request_stop("while a process is stopped")
    try:
        while not (comm.stop_requested() and comm.rank != 1):
            pass
    except un.errors.CommTimeoutError as error:
        return error.rank, str(error)
    finally:
        if comm.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
    return None, "stopped"


@pytest.mark.soak
def test_a_rank_that_does_not_report_is_named_on_all() -> None:
    found = un.launch(stopped_process, 3, "shm", on_failure="continue", timeout=2)
    assert [rank for rank, _ in found] == [0, 1, 2]
    for _, text in found:
        assert "s for rank 1 to report the current step" in text
        assert "rank 1 does not answer: its process is stopped, or busy" in text
