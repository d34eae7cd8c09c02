"""Ranks on the workers of an executor of `concurrent.futures`, which meet at a control server of the caller."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial

from unisono.control.client import SocketControl
from unisono.control.server import ControlServer
from unisono.core.failure import Cause
from unisono.core.group import Group
from unisono.core.registry import unknown_name
from unisono.core.work import seconds_left
from unisono.engines import ENGINES, Engine
from unisono.errors import AbortedError, CommError, CommTimeoutError, PeerLostError
from unisono.host.network import address_of, address_outward, requested_interface
from unisono.launcher.engine_rank import JOB, OVER, Program, ended, run_rank, started
from unisono.launcher.job import Outcome, collect, reported
from unisono.launcher.processes import by_value
from unisono.transports.hierarchical import transport_named

__all__ = ["address_for_workers", "resolve", "run_on"]

_LOCAL = "local"
_END_S = 1.0
_REPORT_WITHIN_S = 2.0
"""Seconds in which a rank that the others have lost may still report an error of its own."""
_FOREVER_S = 1e9


def resolve(on: Executor | Engine | str | None) -> Executor | Engine | None:
    """Return what `on=` of `launch` and `Pool` names; None for processes of this host, which is also "local".

    Args:
        on: An executor, an engine, or the name of one, which is then made without arguments.

    Raises:
        TypeError: It is neither.
        ValueError: There is no engine of this name.

    Example:
        >>> resolve("local") is None, type(resolve("ray")).__name__
        (True, 'Ray')
    """
    if on is None or on == _LOCAL:
        return None
    if isinstance(on, str):
        if on not in ENGINES:
            raise ValueError(unknown_name("engine", on, sorted([*ENGINES.names(), _LOCAL])))
        return ENGINES[on]()
    if isinstance(on, type) or not any(callable(getattr(on, name, None)) for name in ("submit", "workers")):
        raise TypeError(
            "on= must be the name of an engine such as 'ray', an engine such as un.engines.Ray(num_cpus=2), or an "
            f"executor of concurrent.futures such as ProcessPoolExecutor(4), not {on!r}"
        )
    return on


def run_on(on: Executor | Engine, program: Program, size: int, on_failure: str) -> list[Outcome]:
    """Run a program on `size` workers of an executor; outcomes with that of the rank that failed first in front.

    Args:
        on: The executor, or an engine that has one.
        program: Of each rank.
        size: Number of ranks.
        on_failure: As for `launch`.

    Raises:
        CommTimeoutError: Not all ranks have arrived in time.
        TypeError, ValueError: The executor or the backend cannot be used.
    """
    if program.backend != "auto":
        transport = transport_named(program.backend)
        if transport.launcher == "mpirun" or (transport.in_process and size > 1):
            raise ValueError(f"ranks of backend {program.backend!r} cannot run on an executor; leave out backend=")
    start_by = time.monotonic() + program.timeout_s
    found: list[Outcome] = []
    lent = on.workers(size, program.timeout_s) if isinstance(on, Engine) else nullcontext(on)
    with lent as executor:
        gang = _Gang(executor, program, size, start_by)
        try:
            gang.start()
            collect(size, on_failure, gang.outcomes, found)
            culprit = gang.culprit() if any(not outcome.reported for outcome in found) else None
        finally:
            gang.close()
    return sorted(found, key=lambda outcome: outcome.rank != culprit)


class _Gang:
    """Ranks on an executor, as their caller sees them.

    Two sources tell it how ranks end: their futures, and the control plane, which notices a lost rank at once, whatever
    the executor does about that.
    """

    def __init__(self, executor: Executor, program: Program, size: int, start_by: float) -> None:
        self._executor = executor
        self._payload = by_value(program)
        self._timeout_s = program.timeout_s
        self._start_by: float | None = start_by
        self._world = Group.world(0, size, f"{JOB}1")
        self._events: queue.SimpleQueue[tuple[int, Future[bytes]] | CommError] = queue.SimpleQueue()
        self._futures: dict[int, Future[bytes]] = {}
        self._open = set(range(size))
        self._lost: dict[int, float] = {}
        self._cause: CommError | None = None
        self._secret = secrets.token_bytes(32)
        self._server = ControlServer(self._secret, address_for_workers(executor))
        self._control = SocketControl(self._server.address, self._secret)
        self._watcher = threading.Thread(target=self._watch, name="unisono launch", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        """Wait for the first failure of the ranks, or the end of the launch."""
        try:
            self._control.get(OVER, _FOREVER_S, self._world)
        except CommError as error:
            self._cause = error
            self._events.put(error)

    def start(self) -> None:
        """Submit all ranks."""
        common = self._world.size, self._payload, self._server.address, self._secret, self._timeout_s
        for rank in range(self._world.size):
            future = self._executor.submit(run_rank, rank, *common)
            if not hasattr(future, "add_done_callback"):
                raise TypeError(f"submit() of on= must return a future of concurrent.futures, not {future!r}")
            self._futures[rank] = future
            future.add_done_callback(partial(self._put, rank))

    def _put(self, rank: int, future: Future[bytes]) -> None:
        self._events.put((rank, future))

    def outcomes(self, limit_s: float | None) -> list[Outcome]:
        """Return the next outcomes; none at the limit, or after something that is no outcome."""
        dues = [due for due in (self._start_by, *self._lost.values()) if due is not None]
        limits = [limit_s, *map(seconds_left, dues)]
        wait_s = min((limit for limit in limits if limit is not None), default=None)
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return self._overdue()
        if isinstance(event, CommError):
            if isinstance(event, PeerLostError) and event.peer in self._open:
                self._lost[event.peer] = time.monotonic() + _REPORT_WITHIN_S
            return []
        rank, future = event
        del self._futures[rank]
        if rank not in self._open:
            return []
        self._open.remove(rank)
        self._lost.pop(rank, None)
        outcome = _outcome(rank, self._world.size, future)
        if outcome.error is not None and not self._complete():
            self._cancel(f"rank {rank} failed before all ranks had started: {outcome.error}")
        return [outcome]

    def _overdue(self) -> list[Outcome]:
        """Check that all ranks have arrived in time, and return outcomes of lost ranks that have not reported."""
        now = time.monotonic()
        if self._start_by is not None and now >= self._start_by and not self._complete():
            arrived = sum(self._control.check([started(rank)]) for rank in range(self._world.size))
            raise CommTimeoutError(
                f"{arrived} of {self._world.size} ranks arrived within {self._timeout_s:g} s; give the "
                f"{type(self._executor).__name__} as many free workers, or pass a longer timeout=, or a smaller nprocs",
                waited_s=self._timeout_s,
            ) from None
        late = [rank for rank, due in self._lost.items() if now >= due]
        for rank in late:
            del self._lost[rank]
        silent = {rank for rank in late if not self._control.check([ended(rank)])}
        self._open -= silent
        return [_lost(rank, self._world.size, "its worker has ended") for rank in silent]

    def _complete(self) -> bool:
        """Return whether all ranks have arrived."""
        if self._start_by is not None and self._control.check([started(rank) for rank in range(self._world.size)]):
            self._start_by = None
        return self._start_by is None

    def culprit(self) -> int | None:
        """Return the rank that failed first, which the control plane knows: an executor may end all workers at once."""
        self._watcher.join(_END_S)
        return None if self._cause is None else self._cause.peer

    def _cancel(self, why: str) -> None:
        """End ranks that run by the failure of their group, and keep others from starting."""
        with suppress(CommError):
            self._control.set(OVER, b"")
            self._control.report_failure(self._world, Cause("AbortedError", None, why))
        for future in list(self._futures.values()):
            future.cancel()

    def close(self) -> None:
        """End the ranks that still run, if they heed the communicator, and the control plane."""
        if self._futures:
            self._cancel("launch has ended")
        deadline = time.monotonic() + _END_S
        while self._futures and seconds_left(deadline):
            with suppress(queue.Empty):
                event = self._events.get(timeout=seconds_left(deadline))
                if not isinstance(event, CommError):
                    del self._futures[event[0]]
        self._control.close()
        self._watcher.join(_END_S)
        self._server.close()


def address_for_workers(on: Executor | Engine) -> str:
    """Return the address of this host for the workers of an executor or an engine."""
    if isinstance(on, ProcessPoolExecutor):
        return "127.0.0.1"
    requested = requested_interface()
    return address_of(*requested) if requested is not None else address_outward() or "127.0.0.1"


def _outcome(rank: int, size: int, future: Future[bytes]) -> Outcome:
    try:
        outcome = reported(rank, future.result())
    except CancelledError:
        return Outcome(rank, error=AbortedError(f"rank {rank} of {size} was cancelled before it started", peer=rank))
    except BaseException as error:
        # Ray's have a paragraph more.
        return _lost(rank, size, f"{type(error).__name__}: {error}".partition("\n")[0])
    if isinstance(outcome.error, PeerLostError) and outcome.error.peer == rank:
        outcome.reported = False
    return outcome


def _lost(rank: int, size: int, why: str) -> Outcome:
    return Outcome(rank, error=PeerLostError(f"rank {rank} of {size} was lost: {why}", peer=rank), reported=False)
