"""Twenty planted bugs that hang: the report names the rank that is to blame, and the line where it is."""

from __future__ import annotations

import gc
import inspect
import queue
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from insides import control_of, engine_of
from pairwise import short
from waiting import run_concurrently

from unisono.errors import CommTimeoutError, DeadlockError
from unisono.testing import run_ranks
from unisono.testing.pools import pool

SHORT_S = 0.5
Bug = Callable[[Any, threading.Event], None]
BUGS: dict[str, tuple[Bug, int]] = {}


def bug(to_blame: int) -> Callable[[Bug], Bug]:
    """A program with a bug; the line to be named is marked by "here" in a comment."""

    def keep(program: Bug) -> Bug:
        BUGS[program.__name__] = program, to_blame
        return program

    return keep


@bug(1)
def waits_for_an_event(comm: Any, end: threading.Event) -> None:
    if comm.rank == 1:
        end.wait(30)  # here
    comm.all_reduce(torch.ones(2))


@bug(2)
def waits_for_a_queue(comm: Any, end: threading.Event) -> None:
    if comm.rank == 2:
        items: queue.Queue[int] = queue.Queue()
        threading.Thread(target=lambda: (end.wait(30), items.put(1)), daemon=True).start()
        items.get()  # here
    comm.barrier()


@bug(0)
def waits_for_a_lock(comm: Any, end: threading.Event) -> None:
    if comm.rank == 0:
        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=lambda: (end.wait(30), lock.release()), daemon=True).start()
        lock.acquire()  # here
    comm.broadcast(torch.ones(2), 0)


@bug(1)
def sleeps_in_turns(comm: Any, end: threading.Event) -> None:
    if comm.rank == 1:
        while not end.is_set():
            time.sleep(0.01)  # here
    comm.all_reduce(torch.ones(2))


@bug(2)
def computes_for_ever(comm: Any, end: threading.Event) -> None:
    if comm.rank == 2:
        all(iter(lambda: not end.is_set(), False))  # here
    comm.all_reduce(torch.ones(2))


def _loads(end: threading.Event) -> None:
    end.wait(30)  # here, in a function


@bug(1)
def loads_data_for_ever(comm: Any, end: threading.Event) -> None:
    if comm.rank == 1:
        _loads(end)
    comm.all_gather([torch.ones(2) for _ in range(comm.size)], torch.ones(2))


@bug(1)
def receives_what_nobody_sends(comm: Any, end: threading.Event) -> None:
    if comm.rank == 1:
        comm.recv(torch.ones(2), 0, timeout=30)  # here
    comm.all_reduce(torch.ones(2))


@bug(1)
def receives_with_another_tag(comm: Any, end: threading.Event) -> None:
    if comm.rank == 0:
        comm.isend(torch.ones(2), 1, tag=3)
    if comm.rank == 1:
        comm.recv(torch.ones(2), 0, tag=4, timeout=30)  # here
    comm.barrier()


@bug(2)
def is_in_another_group(comm: Any, end: threading.Event) -> None:
    twin = comm.dup()
    if comm.rank == 2:
        twin.barrier(timeout=30)  # here
    comm.barrier()


@bug(0)
def is_in_a_part_that_is_not_complete(comm: Any, end: threading.Event) -> None:
    part = comm.subgroup([0, 1])
    if comm.rank == 0:
        part.all_reduce(torch.ones(1), timeout=30)  # here
    comm.all_reduce(torch.ones(2))


@bug(1)
def skips_a_call_after_some_rounds(comm: Any, end: threading.Event) -> None:
    for step in range(5):
        if comm.rank == 1 and step == 3:
            end.wait(30)  # here
        comm.all_reduce(torch.ones(2))


@bug(2)
def waits_in_a_generator(comm: Any, end: threading.Event) -> None:
    def batches() -> Any:
        yield 1
        if comm.rank == 2:
            end.wait(30)  # here
        yield 2

    for _ in batches():
        comm.all_reduce(torch.ones(2))


@bug(1)
def waits_in_a_lambda(comm: Any, end: threading.Event) -> None:
    wait = lambda: end.wait(30)  # noqa: E731  # here
    if comm.rank == 1:
        wait()
    comm.reduce(torch.ones(2), 0)


@bug(1)
def waits_for_a_thread(comm: Any, end: threading.Event) -> None:
    if comm.rank == 1:
        worker = threading.Thread(target=end.wait, args=(30,))
        worker.start()
        worker.join()  # here
    comm.scatter(torch.ones(1), [torch.ones(1) for _ in range(comm.size)] if comm.rank == 0 else None, 0)


@bug(0)
def waits_in_monitored_barrier(comm: Any, end: threading.Event) -> None:
    if comm.rank == 0:
        end.wait(30)  # here
    comm.monitored_barrier()


@bug(2)
def breaks_out_of_the_loop_early(comm: Any, end: threading.Event) -> None:
    for step in range(4):
        if comm.rank == 2 and step == 2:
            break
        comm.all_reduce(torch.ones(2))
    if comm.rank == 2:
        end.wait(30)  # here


@bug(1)
def waits_for_an_answer_in_the_wrong_order(comm: Any, end: threading.Event) -> None:
    if comm.rank == 0:
        comm.recv(torch.ones(1), 1)
    elif comm.rank == 1:
        comm.recv(torch.ones(1), 0, timeout=30)  # here
    else:
        comm.barrier()


@bug(2)
def goes_round_a_ring_of_receives(comm: Any, end: threading.Event) -> None:
    comm.recv(torch.ones(1), (comm.rank + 1) % comm.size)  # here


@bug(0)
def crosses_two_groups(comm: Any, end: threading.Event) -> None:
    one, two = comm.dup(), comm.dup()
    for each in (two, one) if comm.rank == 0 else (one, two):
        each.barrier()  # here


@bug(1)
def waits_in_an_except_block(comm: Any, end: threading.Event) -> None:
    try:
        if comm.rank == 1:
            raise KeyError("mine")
    except KeyError:
        end.wait(30)  # here
    comm.all_reduce(torch.ones(2))


def marked_line(program: Bug) -> int:
    source = _loads if program is loads_data_for_ever else program
    lines, first = inspect.getsourcelines(source)
    return first + next(index for index, line in enumerate(lines) if "# here" in line)


def hang(comm: Any, name: str) -> str:
    """Return the error of this rank for a bug, on a separate communicator."""
    part, end = comm.dup(), threading.Event()
    engine_of(part).options = engine_of(part).options.__class__(part.backend, timeout_s=SHORT_S)
    part._options, engine_of(part)._limit_s = engine_of(part).options, SHORT_S
    comm.barrier()
    # The one to blame is let go when the group has failed.
    threading.Thread(
        target=lambda: (control_of(part).first_cause(engine_of(part).group, 20.0), end.set()), daemon=True
    ).start()
    try:
        BUGS[name][0](part, end)
        part.barrier()
    except CommTimeoutError as error:
        return str(error)
    except Exception as error:
        return f"not a timeout: {error!r}"
    finally:
        end.set()
    return "nothing was raised"


def check(name: str, told: list[str]) -> None:
    program, to_blame = BUGS[name]
    place = f"test_hang_reports.py:{marked_line(program)}"
    for rank, text in enumerate(told):
        if rank == to_blame and "not a timeout" in text:
            continue
        about = [line for line in text.splitlines() if line.startswith(f"  rank {to_blame} ")]
        assert any(place in line for line in about), f"rank {rank} was not told of {place}, but:\n{text}"


def test_at_least_twenty_hangs() -> None:
    assert len(BUGS) == 20


SAMPLE = list(BUGS)[::3]


@pytest.fixture(scope="module")
def sampled() -> dict[str, list[str]]:
    """What the ranks of the sample were told. They only wait, so all do it at the same time."""
    calls = [partial(run_ranks, hang, 3, "thread", name) for name in SAMPLE]
    return dict(zip(SAMPLE, run_concurrently(*calls), strict=True))


@pytest.mark.parametrize("name", SAMPLE)
def test_report_names_rank_and_line_with_threads(sampled: dict[str, list[str]], name: str) -> None:
    check(name, sampled[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in BUGS if name not in SAMPLE])
def test_more_reports_name_rank_and_line_with_threads(name: str) -> None:
    check(name, run_ranks(hang, 3, "thread", name))


@short(
    "name,backend",
    product(BUGS, ["shm", "gloo"]),
    [("waits_for_an_event", "shm"), ("waits_in_a_generator", "gloo")],
)
def test_report_names_rank_and_line_with_processes(name: str, backend: str) -> None:
    check(name, pool(backend, 3).run(hang, name))


def test_failed_communicator_that_was_let_go_is_told_of() -> None:
    gone, done = threading.Event(), threading.Event()

    def program(comm: Any) -> str:
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError):
                comm.dup().barrier(timeout=0.2)
            gc.collect()
            gone.set()
            done.wait(30)
            return ""
        comm.dup()
        gone.wait(30)
        with pytest.raises(CommTimeoutError) as raised:
            comm.barrier(timeout=0.2)
        done.set()
        return str(raised.value)

    told = run_ranks(program, 2, "thread")[1]
    assert re.search(r"\n  rank 0 .*barrier #1 at test_hang_reports.py", told), told


def test_a_deadlock_through_a_split_is_found() -> None:
    def program(comm: Any) -> None:
        one, two = comm.dup(), comm.dup()
        if comm.rank == 1:
            with pytest.raises(DeadlockError, match=r"rank 0 is in split at test_hang_reports\.py:"):
                two.barrier(timeout=SHORT_S)
        # Rank 0 waits in here meanwhile.
        one.dup()

    run_ranks(program, 2, "thread")
