"""What can go wrong between ranks, a function each; and what every rank must then have been told.

A program gets a communicator of its own, of three ranks. Rank 1 is the one that does something else, unless it says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import unisono as un
from unisono.errors import (
    AbortedError,
    ClosedError,
    CommError,
    CommTimeoutError,
    DeadlockError,
    MismatchError,
    PeerLostError,
)

SIZE = 3
ODD = 1
SHORT_S = 0.8
LONG_S = 20.0
MISMATCH_S, DEATH_S, LATE_S, TOGETHER_S = 0.2, 0.5, 0.5, 0.3
LEAVE_S = 1.5
"""Who leaves in peace lets a second pass in which others may still take what it has sent."""


Program = Callable[[Any], None]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        name: As the table calls it.
        run: What every rank does; it raises, or fails the test.
        kinds: What every rank raises, by rank; the same on all if there is one only.
        within_s: After the last rank has come.
        names_odd: Whether every error names rank 1.
        fatal: Whether it ends a process, so that ranks of its own are needed.
        gone: Which ranks are not there any more at the end.
        impossible: For some backends, why it cannot happen there.
        breaks: Whether the communicator is broken afterwards.
        check: As for `init`.
        named: What errors say in their fields.
        odd_counts: Whether the time counts at which rank 1 itself is told.
    """

    name: str
    run: Program
    kinds: tuple[type[BaseException], ...]
    within_s: float = MISMATCH_S
    names_odd: bool = True
    fatal: bool = False
    gone: frozenset[int] = frozenset()
    impossible: dict[str, str] = field(default_factory=dict)
    breaks: bool = True
    check: str = "auto"
    named: tuple[str, ...] = ("rank", "size", "operation", "call", "group")

    odd_counts: bool = True

    def kind(self, rank: int) -> type[BaseException]:
        return self.kinds[rank] if len(self.kinds) > 1 else self.kinds[0]


FAULTS: dict[str, Fault] = {}


def fault(name: str, *kinds: type[BaseException], **more: Any) -> Callable[[Program], Program]:
    def keep(run: Program) -> Program:
        FAULTS[name] = Fault(name, run, kinds, **more)
        return run

    return keep


def odd(comm: Any) -> bool:
    return bool(comm.rank == ODD)


# -- ranks call different things -------------------------------------------------------------------
@fault("unequal sizes in all_reduce", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(5 if odd(comm) else 4))


@fault("unequal sizes, far above the first stage", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones((1 << 20) + odd(comm)))


@fault("no elements on one rank", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(0 if odd(comm) else 4))


@fault("dtypes of one width", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4, dtype=torch.int32 if odd(comm) else torch.float32))


@fault("dtypes of other width", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4, dtype=torch.float64 if odd(comm) else torch.float32))


@fault("sum against max", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4), "max" if odd(comm) else "sum")


@fault("average against sum", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4), "avg" if odd(comm) else "sum")


@fault("roots differ in broadcast", MismatchError)
def _(comm: Any) -> None:
    comm.broadcast(torch.ones(4), 2 if odd(comm) else 0)


@fault("roots differ in reduce", MismatchError)
def _(comm: Any) -> None:
    comm.reduce(torch.ones(4), 2 if odd(comm) else 0)


@fault("roots differ in gather", MismatchError)
def _(comm: Any) -> None:
    root = 1 if odd(comm) else 0
    out = [torch.zeros(4) for _ in range(comm.size)] if comm.rank == root else None
    comm.gather(torch.ones(4), out, root)


@fault("roots differ in scatter", MismatchError)
def _(comm: Any) -> None:
    root = 1 if odd(comm) else 0
    given = [torch.zeros(4) for _ in range(comm.size)] if comm.rank == root else None
    comm.scatter(torch.ones(4), given, root)


@fault("roots differ in broadcast_object", MismatchError)
def _(comm: Any) -> None:
    comm.broadcast_object("x", 2 if odd(comm) else 0)


@fault("another operation", MismatchError)
def _(comm: Any) -> None:
    comm.broadcast(torch.ones(4), 0) if odd(comm) else comm.all_reduce(torch.ones(4))


@fault("a collective against a barrier", MismatchError)
def _(comm: Any) -> None:
    comm.barrier() if odd(comm) else comm.all_reduce(torch.ones(4))


@fault("a missing call, then others", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4))
    if not odd(comm):
        comm.all_reduce(torch.ones(4))
    comm.broadcast(torch.ones(2), 0)


@fault("crossed order of two calls", MismatchError)
def _(comm: Any) -> None:
    calls = [lambda: comm.all_reduce(torch.ones(4)), lambda: comm.all_reduce(torch.ones(4, dtype=torch.float64))]
    for call in reversed(calls) if odd(comm) else calls:
        call()


@fault("crossed order of two asynchronous calls", MismatchError)
def _(comm: Any) -> None:
    tensors = [torch.ones(4), torch.ones(8)]
    works = [comm.all_reduce(t, async_op=True) for t in (reversed(tensors) if odd(comm) else tensors)]
    for work in works:
        work.wait()


@fault("algorithms differ", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(8), algorithm="ring" if odd(comm) else "direct")


@fault("unequal lists in all_gather", MismatchError)
def _(comm: Any) -> None:
    lengths = (2, 2, 3) if odd(comm) else (2, 2, 2)
    comm.all_gather([torch.zeros(n) for n in lengths], torch.ones(2))


@fault("unequal sizes in reduce_scatter", MismatchError)
def _(comm: Any) -> None:
    length = 3 if odd(comm) else 2
    comm.reduce_scatter(torch.zeros(length), [torch.ones(length) for _ in range(comm.size)])


@fault("unequal sizes in scatter", MismatchError)
def _(comm: Any) -> None:
    given = [torch.zeros(4) for _ in range(comm.size)] if comm.rank == 0 else None
    comm.scatter(torch.ones(5 if odd(comm) else 4), given, 0)


@fault("rows that do not fit in all_to_all", MismatchError)
def _(comm: Any) -> None:
    expected = [3 if odd(comm) and r != comm.rank else 2 for r in range(comm.size)]
    comm.all_to_all_single(torch.zeros(sum(expected)), torch.ones(2 * comm.size), expected, [2] * comm.size)


@fault("different lists given to subgroup", MismatchError, breaks=False, names_odd=True)
def _(comm: Any) -> None:
    comm.subgroup([0, 1] if odd(comm) else [0, 2])


@fault("a rank with other code: another model", MismatchError, breaks=False, named=("rank", "size"))
def _(comm: Any) -> None:
    un.GradientAverager(torch.nn.Linear(4, 3 if odd(comm) else 2), comm)


@fault("shapes differ, in check='full'", MismatchError, check="full")
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones((4,) if odd(comm) else (2, 2)))


@fault("a buffer changed before wait, in check='full'", MismatchError, check="full", names_odd=False)
def _(comm: Any) -> None:
    tensor = torch.ones(4)
    work = comm.all_reduce(tensor, async_op=True)
    if odd(comm):
        tensor.zero_()
    work.wait()
    comm.barrier(timeout=LONG_S)


# -- messages that do not fit ----------------------------------------------------------------------
def _message(comm: Any, sent: torch.Tensor, expected: torch.Tensor) -> None:
    """From rank 0 to rank 1, while rank 2 is in a barrier."""
    if comm.rank == 0:
        comm.send(sent, 1)
    elif odd(comm):
        comm.recv(expected, 0)
    comm.barrier(timeout=LONG_S)


@fault("a message longer than its receive", MismatchError)
def _(comm: Any) -> None:
    _message(comm, torch.ones(5), torch.ones(4))


@fault("a message shorter than its receive", MismatchError)
def _(comm: Any) -> None:
    _message(comm, torch.ones(3), torch.ones(4))


@fault("a message of another dtype", MismatchError)
def _(comm: Any) -> None:
    _message(comm, torch.ones(4), torch.ones(4, dtype=torch.int32))


# -- ranks that do not come ------------------------------------------------------------------------
@fault("a rank that comes too late", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        _until_broken(comm)
    comm.all_reduce(torch.ones(4), timeout=SHORT_S)


@fault("a rank that is busy elsewhere, for a monitored_barrier", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        _until_broken(comm)
    comm.monitored_barrier(timeout=SHORT_S)


@fault("a rank that waits for a lock of its own", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        threading.Lock().acquire()
        _until_broken(comm)
    comm.barrier(timeout=SHORT_S)


@fault("a receive that nobody sends to", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if comm.rank == 0:
        comm.recv(torch.ones(4), ODD, timeout=SHORT_S)
    _until_broken(comm)
    comm.barrier()


@fault("a tag that nobody sends", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        comm.isend(torch.ones(4), 0, tag=1)
    if comm.rank == 0:
        comm.recv(torch.ones(4), ODD, tag=2, timeout=SHORT_S)
    _until_broken(comm)
    comm.barrier()


@fault(
    "sends that face each other",
    CommTimeoutError,
    within_s=SHORT_S + LATE_S,
    impossible={
        "shm": "rings of 128 KiB take short messages in; see the next row",
        "gloo": "short messages are taken in; see the next row",
        "mpi": "short messages are taken in; see the next row",
    },
)
def _(comm: Any) -> None:
    if comm.rank < 2:
        comm.send(torch.ones(4), 1 - comm.rank, timeout=SHORT_S)
    comm.barrier(timeout=LONG_S)


@fault("receives that face each other", DeadlockError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if comm.rank < 2:
        comm.recv(torch.ones(4), 1 - comm.rank, timeout=SHORT_S)
    comm.barrier(timeout=LONG_S)


# A `DeadlockError` where the circle was proved before one of its waits ended.
@fault("two groups, interleaved", CommTimeoutError, within_s=SHORT_S + LATE_S, breaks=False)
def _(comm: Any) -> None:
    one, two = comm.dup(), comm.dup()
    first, second = (two, one) if odd(comm) else (one, two)
    first.barrier(timeout=SHORT_S)
    second.barrier(timeout=SHORT_S)


# -- ranks that fail -------------------------------------------------------------------------------
@fault("an early exit", PeerLostError, within_s=LEAVE_S, odd_counts=False)
def _(comm: Any) -> None:
    if odd(comm):
        comm.close()
        raise PeerLostError("rank 1 left", rank=1, size=SIZE, operation="close", call=1, group="-")
    comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault("an exception in one rank", PeerLostError, KeyError, PeerLostError, within_s=DEATH_S)
def _(comm: Any) -> None:
    with comm:
        if odd(comm):
            raise KeyError("weights.pt")
        comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault("an exception in one rank, others in messages", PeerLostError, KeyError, PeerLostError, within_s=DEATH_S)
def _(comm: Any) -> None:
    with comm:
        if odd(comm):
            raise KeyError("weights.pt")
        comm.recv(torch.ones(4), ODD, timeout=LONG_S)


@fault("a wrong argument on one rank", PeerLostError, ValueError, PeerLostError, within_s=DEATH_S)
def _(comm: Any) -> None:
    with comm:
        comm.all_reduce(torch.ones(4), "no such thing" if odd(comm) else "sum", timeout=LONG_S)


@fault("abort", AbortedError, within_s=DEATH_S)
def _(comm: Any) -> None:
    if odd(comm):
        comm.abort("enough")
    comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault("a call on what is closed", ClosedError, names_odd=False, breaks=False)
def _(comm: Any) -> None:
    comm.close()
    comm.all_reduce(torch.ones(4))


@fault("a second thread", CommError, names_odd=False, breaks=False)
def _(comm: Any) -> None:
    comm.barrier()
    raise _of_a_thread(comm.barrier)


@fault(
    "a fork in the middle that calls",
    CommError,
    within_s=5.0,
    names_odd=False,
    breaks=False,
    impossible={
        "thread": "a fork of threads keeps one of them",
    },
)
def _(comm: Any) -> None:
    comm.barrier()
    raise _of_a_fork(lambda: comm.split(0), comm)


@fault(
    "a second process for one rank",
    MismatchError,
    names_odd=False,
    breaks=False,
    impossible={
        "thread": "threads are of one process",
    },
)
def _(comm: Any) -> None:
    # Rank 0 hosts a small job, in which both others claim to be rank 1.
    address = comm.broadcast_object(_free_port() if comm.rank == 0 else None)
    claimed = 0 if comm.rank == 0 else 1
    try:
        un.init("gloo", init_method=address, rank=claimed, world_size=2, timeout=5.0, secret="of a test").close()
    except MismatchError as error:
        raise error.locate(rank=comm.rank, size=comm.size, operation="init", call=1, group="world") from None
    comm.barrier()
    message = "the other one was refused"
    raise MismatchError(message, rank=comm.rank, size=comm.size, operation="init", call=1, group="world")


@fault(
    "a control connection that is cut",
    PeerLostError,
    within_s=DEATH_S,
    fatal=True,
    gone=frozenset({ODD}),
    impossible={
        "thread": "threads have no connection",
    },
)
def _(comm: Any) -> None:
    comm.barrier()
    if odd(comm):
        comm._control._line.hang_up()
    comm.all_reduce(torch.ones(4), timeout=LONG_S)
    comm.all_reduce(torch.ones(4), timeout=LONG_S)


NO_PROCESS = {"thread": "a thread cannot be ended from outside: the signal would end all ranks"}


def _ended(comm: Any, how: Callable[[], object]) -> None:
    comm.barrier()
    if odd(comm):
        how()
    comm.all_reduce(torch.ones(4), timeout=LONG_S)
    comm.all_reduce(torch.ones(4), timeout=LONG_S)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_DEATH: dict[str, Any] = {"within_s": DEATH_S, "fatal": True, "gone": frozenset({ODD}), "impossible": NO_PROCESS}


@fault("SIGKILL between calls", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, _kill)


@fault("SIGKILL in a collective", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    comm.barrier()
    if odd(comm):
        threading.Timer(0.1, _kill).start()
        comm.recv(torch.ones(4), 0)
    comm.all_reduce(torch.ones(1 << 16), timeout=LONG_S)


@fault("SIGKILL in a message", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    comm.barrier()
    if odd(comm):
        threading.Timer(0.1, _kill).start()
    comm.recv(torch.ones(4), 2 if odd(comm) else ODD, timeout=LONG_S)


@fault("SIGTERM", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, lambda: os.kill(os.getpid(), signal.SIGTERM))


@fault("SIGSEGV", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, lambda: os.kill(os.getpid(), signal.SIGSEGV))


@fault("os._exit", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, lambda: os._exit(3))


@fault("sys.exit", PeerLostError, SystemExit, PeerLostError, within_s=LEAVE_S)
def _(comm: Any) -> None:
    with comm:
        if odd(comm):
            sys.exit(3)
        comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault("SIGSTOP", CommTimeoutError, within_s=SHORT_S + LATE_S, odd_counts=False, impossible=NO_PROCESS)
def _(comm: Any) -> None:
    pids = comm.all_gather_object(os.getpid())
    comm.barrier()
    if odd(comm):
        os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier(timeout=LONG_S)
    try:
        comm.all_reduce(torch.ones(4), timeout=SHORT_S)
    finally:
        comm.stopped = pids[ODD]


@fault(
    "SIGSTOP, others in messages", CommTimeoutError, within_s=SHORT_S + LATE_S, odd_counts=False, impossible=NO_PROCESS
)
def _(comm: Any) -> None:
    pids = comm.all_gather_object(os.getpid())
    comm.barrier()
    if odd(comm):
        os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier(timeout=LONG_S)
    try:
        comm.recv(torch.ones(4), ODD, timeout=SHORT_S)
    finally:
        comm.stopped = pids[ODD]


# -- helpers ---------------------------------------------------------------------------------------
def _until_broken(comm: Any) -> None:
    """Do something else until the group has failed."""
    deadline = time.monotonic() + LONG_S
    while comm._control.cause(comm._engine.group, 0.05) is None:
        assert time.monotonic() < deadline, "the group never failed"


def _of_a_thread(call: Callable[[], object]) -> BaseException:
    """What a call raises in another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG_S)
    return raised[0] if raised else AssertionError("nothing was raised in the other thread")


def _of_a_fork(call: Callable[[], object], comm: Any) -> BaseException:
    """What a call says in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing was raised"
        try:
            call()
        except CommError as error:
            said = str(error)
        except BaseException as error:
            said = f"not a CommError but {error!r}"
        os.write(writer, said.encode()[:1000])
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 2000).decode()
    os.close(reader)
    os.waitpid(child, 0)
    if "fork" not in said:
        return AssertionError(said)
    return CommError(said, rank=comm.rank, size=comm.size, operation="split", call=1, group="world")


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


# -- what every rank saw ---------------------------------------------------------------------------
@dataclass
class Seen:
    """What became of a rank: times are of the monotonic clock, which all processes of a host share."""

    rank: int
    kind: str = "nothing was raised"
    classes: tuple[str, ...] = ()
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    came_s: float = 0.0
    told_s: float = 0.0
    later: str = ""
    later_text: str = ""
    later_took_s: float = 0.0


def observe(comm: Any, name: str, own: bool) -> Seen:
    """Be a rank of a fault: run it on a communicator of its own, and tell what happened."""
    found = FAULTS[name]
    # Which ones are broken by it is the fault's business; the one that it was made of stays.
    part = comm if own else comm.dup()
    comm.barrier()
    seen = Seen(comm.rank, came_s=time.monotonic())
    try:
        found.run(part)
    except (Exception, SystemExit) as error:
        seen.told_s = time.monotonic()
        seen.kind, seen.text = type(error).__name__, str(error)
        seen.classes = tuple(kind.__name__ for kind in type(error).__mro__)
        seen.fields = {key: getattr(error, key, None) for key in ("rank", "size", "operation", "call", "group", "peer")}
    started = time.monotonic()
    try:
        part.barrier(timeout=5.0)
    except CommError as error:
        seen.later, seen.later_text = type(error).__name__, str(error)
    seen.later_took_s = time.monotonic() - started
    if hasattr(part, "stopped") and not odd(comm):
        # Whoever is told first, all are: the group has failed.
        os.kill(part.stopped, signal.SIGCONT)
    return seen
