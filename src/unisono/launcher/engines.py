"""Ranks on the workers of a `concurrent.futures` executor. Ranks rendezvous at the caller's control server."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import nullcontext, suppress

from unisono.control.client import SocketControl
from unisono.control.server import ControlServer
from unisono.core import clock
from unisono.core.closing import Closing
from unisono.core.failure import Cause
from unisono.core.registry import unknown_name
from unisono.core.work import seconds_left
from unisono.engines import ENGINES, Engine
from unisono.errors import AbortedError, CommError, CommTimeoutError, PeerLostError
from unisono.host.network import address_of, address_outward, requested_interface
from unisono.launcher.engine_rank import OVER, Program, host_of, run_rank, started
from unisono.launcher.job import reported
from unisono.launcher.processes import by_value
from unisono.launcher.supervisor import END_S, Outcome, Supervisor, lost
from unisono.transports.hierarchical import transport_named

__all__ = ["address_for_workers", "resolve", "run_on"]

_LOCAL = "local"
_EXPLAIN_WITHIN_S = 1.0
"""Seconds to wait for the engine to report why a rank was lost."""


def resolve(on: Executor | Engine | str | None) -> Executor | Engine | None:
    """Return the engine or executor for the argument `on` of `launch` and `Pool`; None for processes on this host.

    Args:
        on: An executor, an engine, or the name of an engine to create with default options. "local" and None mean this
            host.

    Raises:
        TypeError: `on` is not an executor, an engine, a string or None.
        ValueError: `on` is a string, but not the name of an engine.

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
    """Run a program on `size` workers of an executor; return the outcomes, with the first lost rank's at the front.

    Args:
        on: The executor, or an engine that provides one.
        program: Program of each rank.
        size: Number of ranks.
        on_failure: As for `launch`.

    Raises:
        CommTimeoutError: Not all ranks arrived in time.
        TypeError, ValueError: The executor or the backend cannot be used.
    """
    backend = program.options.backend
    if backend != "auto":
        transport = transport_named(backend)
        if transport.launcher == "mpirun" or (transport.in_process and size > 1):
            raise ValueError(f"ranks of backend {backend!r} cannot run on an executor; leave out backend=")
    if on_failure == "replace" and not getattr(on, "replaces", False):
        raise ValueError(
            f"on_failure='replace' needs an engine that starts a lost rank again, such as 'ray', 'dask' or 'local': "
            f"{type(on).__name__} cannot"
        )
    start_by = clock.now() + program.options.timeout_s
    lent = on.workers(size, program.options.timeout_s) if isinstance(on, Engine) else nullcontext(on)
    owned = getattr(on, "starts_workers", False)
    with lent as executor, _LentRanks(executor, program, size, start_by, on_failure, owned=owned) as lent_ranks:
        found = lent_ranks.supervisor.run()
        lent_ranks.name_lost_hosts(found)
        first_lost = lent_ranks.first_lost() if any(not outcome.reported for outcome in found) else None
    return sorted(found, key=lambda outcome: outcome.rank != first_lost)


class _LentRanks(Closing):
    """Ranks on an executor, as seen by the process that started them.

    A rank's future completes when the rank has ended. The control plane also notices immediately when the rank's
    process disconnects, even if the executor does not. An executor may lose the result of a rank that has ended, so
    that the rank's future never completes. Therefore, the future gets a deadline when the rank's process disconnects.
    An event contains the rank, the index of its attempt, and either its future or a flag that shows whether the rank
    had finished when its process disconnected.
    """

    def __init__(
        self, executor: Executor, program: Program, size: int, start_by: float, on_failure: str, *, owned: bool
    ) -> None:
        self._executor = executor
        self._lender = type(executor).__name__
        self._payload = by_value(program)
        self._timeout_s = program.options.timeout_s
        self._size = size
        self._owned = owned
        self._start_by: float | None = start_by
        self._events: queue.SimpleQueue[tuple[int, int, Future[bytes] | bool]] = queue.SimpleQueue()
        self._futures: dict[int, Future[bytes]] = {}
        # Deadlines of ranks, and their check functions. A check function takes a rank and whether its deadline has
        # passed. It returns the rank's outcome, or None if the rank may still report.
        self._due: dict[int, tuple[float, Callable[[int, bool], Outcome | None]]] = {}
        self._first_lost: Future[int] = Future()
        self._secret = secrets.token_bytes(32)
        self._server = ControlServer(self._secret, address_for_workers(executor), on_left=self._note_left)
        self._control = SocketControl(self._server.address, self._secret)
        admits = self._control if on_failure == "replace" else None
        self.supervisor = Supervisor(self._start, self._ends, range(size), on_failure, admits)

    def _note_left(self, label: str) -> None:
        """Record that a rank has ended or is lost. Runs in the control plane's thread."""
        rank, attempt, ended = map(int, label.split("/"))
        if not ended and not self._first_lost.done():
            self._first_lost.set_result(rank)
        self._events.put((rank, attempt, bool(ended)))

    def _start(self, rank: int, attempt: int) -> None:
        common = self._size, self._payload, self._server.address, self._secret, self._timeout_s, self._owned
        future = self._executor.submit(run_rank, rank, attempt, *common)
        if not hasattr(future, "add_done_callback"):
            raise TypeError(f"submit() of on= must return a future of concurrent.futures, not {future!r}")
        self._futures[rank] = future
        future.add_done_callback(lambda done: self._events.put((rank, attempt, done)))
        if attempt:
            self._due[rank] = clock.now() + self._timeout_s, self._unstarted

    def _ends(self, limit_s: float | None) -> list[Outcome]:
        dues = [self._start_by, *(due for due, _ in self._due.values())]
        # Check ranks with deadlines every second: the engine may know before the deadline that a rank is lost.
        limits = [limit_s, _EXPLAIN_WITHIN_S if self._due else None, *(due and seconds_left(due) for due in dues)]
        wait_s = min((limit for limit in limits if limit is not None), default=None)
        try:
            rank, attempt, event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return self._overdue()
        if attempt != self.supervisor.last[rank] or rank not in self._futures:
            return []
        if not isinstance(event, bool):
            del self._futures[rank]
            return [self._concluded(self._outcome(rank, event))]
        if event:
            self._due[rank] = clock.now() + self._timeout_s, self._undelivered
        else:
            self._due[rank] = clock.now() + _EXPLAIN_WITHIN_S, self._gone
        return []

    def _overdue(self) -> list[Outcome]:
        """Raise an error if ranks have not arrived in time; return the outcomes of ranks that won't report any more."""
        now = clock.now()
        if self._start_by is not None and now >= self._start_by and not self._complete():
            arrived = sum(self._control.check([started(rank, 0)]) for rank in range(self._size))
            raise CommTimeoutError(
                f"{arrived} of {self._size} ranks arrived within {self._timeout_s:g} s; give the "
                f"{self._lender} as many free workers, or pass a longer timeout=, or a smaller nprocs",
                waited_s=self._timeout_s,
            ) from None
        found = []
        for rank, (due, check) in list(self._due.items()):
            outcome = check(rank, now >= due)
            if outcome is not None:
                self._futures.pop(rank).cancel()
                found.append(self._concluded(outcome))
        return found

    def _gone(self, rank: int, late: bool) -> Outcome | None:
        """Treat a rank as lost after its deadline: some engines report lost workers only after all ranks have ended."""
        return self._lost(rank, "its worker has ended") if late else None

    def _unstarted(self, rank: int, late: bool) -> Outcome | None:
        if self._control.check([started(rank, self.supervisor.last[rank])]):
            del self._due[rank]
            return None
        return self._lost(rank, f"not started again within {self._timeout_s:g} s") if late else None

    def _undelivered(self, rank: int, late: bool) -> Outcome | None:
        """Return the outcome of a rank that has finished, if its result was lost or did not arrive in time."""
        why_lost = getattr(self._executor, "why_lost", lambda future: None)
        why = why_lost(self._futures[rank]) or (late and f"it has not arrived within {self._timeout_s:g} s")
        if not why:
            return None
        # Keep the default, `reported=True`: this rank has finished its program, and `reported=False` would start it
        # again.
        text = f"rank {rank} of {self._size} has ended, but {self._lender} lost its result: {why}"
        return Outcome(rank, error=PeerLostError(text, peer=rank))

    def _outcome(self, rank: int, future: Future[bytes]) -> Outcome:
        try:
            outcome = reported(rank, future.result())
        except CancelledError:
            if self._control.check([started(rank, self.supervisor.last[rank])]) and not self._control.check([OVER]):
                why = "cancelled its task, which had started, as when its scheduler dies or workers are restarted"
                return self._lost(rank, f"{self._lender} {why}")
            text = f"rank {rank} of {self._size} was cancelled before it started"
            return Outcome(rank, error=AbortedError(text, peer=rank))
        except BaseException as error:
            # Keep only the error's first line, because Ray adds a paragraph.
            return self._lost(rank, f"{type(error).__name__}: {error}".partition("\n")[0])
        if isinstance(outcome.error, PeerLostError) and outcome.error.peer == rank:
            outcome.reported = False
        return outcome

    def _lost(self, rank: int, why: str) -> Outcome:
        return lost(rank, self._size, f"was lost: {why}")

    def _concluded(self, outcome: Outcome) -> Outcome:
        """Return a rank's outcome. If the rank failed before all ranks had started, stop the other ranks."""
        self._due.pop(outcome.rank, None)
        if outcome.error is not None and not self._complete():
            self.supervisor.stop()
            self._cancel(f"rank {outcome.rank} failed before all ranks had started: {outcome.error}")
        return outcome

    def _complete(self) -> bool:
        """Return whether all ranks have arrived."""
        if self._start_by is not None and self._control.check([started(rank, 0) for rank in range(self._size)]):
            self._start_by = None
        return self._start_by is None

    def first_lost(self) -> int | None:
        """Return the rank that the control plane lost first; after that loss, executors may kill all other workers."""
        with suppress(TimeoutError):
            return self._first_lost.result(END_S)
        return None

    def name_lost_hosts(self, found: Sequence[Outcome]) -> None:
        """If all of a host's ranks are lost, but not all ranks of the job, name the host in these ranks' errors."""
        lost = {outcome.rank: outcome for outcome in found if not outcome.reported}
        hosts: dict[bytes, list[int]] = {}
        # If the control plane is unreachable, keep the errors unchanged.
        with suppress(CommError):
            for rank in range(self._size if len(lost) > 1 else 0):
                if self._control.check([host_of(rank)]):
                    hosts.setdefault(self._control.get(host_of(rank), END_S), []).append(rank)
        for host, ranks in hosts.items():
            if 1 < len(ranks) < self._size and lost.keys() >= set(ranks):
                these = ", ".join(map(str, ranks))
                for rank in ranks:
                    text = f"host {host.decode()} was lost, with ranks {these} of {self._size}: {lost[rank].error}"
                    lost[rank].error = PeerLostError(text, peer=rank)

    def _cancel(self, why: str) -> None:
        """Stop running ranks by failing their group, and prevent pending ranks from starting."""
        with suppress(CommError):
            self._control.set(OVER, b"")
            self._control.fail_all(Cause("AbortedError", None, why))
        for future in list(self._futures.values()):
            future.cancel()

    def close(self) -> None:
        """Make running ranks fail at their next call on the communicator, and close the control plane."""
        if self._futures:
            self._cancel("launch has ended")
        deadline = clock.now() + END_S
        while self._futures and seconds_left(deadline):
            with suppress(queue.Empty):
                rank, attempt, event = self._events.get(timeout=seconds_left(deadline))
                if not isinstance(event, bool) and attempt == self.supervisor.last[rank]:
                    self._futures.pop(rank, None)
        self._control.close()
        self._server.close()


def address_for_workers(on: Executor | Engine) -> str:
    """Return the address at which workers of an executor or engine can reach this host."""
    if isinstance(on, ProcessPoolExecutor):
        return "127.0.0.1"
    requested = requested_interface()
    return address_of(*requested) if requested is not None else address_outward() or "127.0.0.1"
