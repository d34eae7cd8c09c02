"""Rendezvous under mpirun: MPI provides rank, size and local rank, and transfers rank 0's address and secret.

Under mpirun, ranks can use any backend, not only MPI. If a rank exits too early, the job is aborted; see `job_end`.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

from unisono import serialization
from unisono.bootstrap.rendezvous import InitRequest, RankClaim, Rendezvous, acquire, alone, meet
from unisono.control.process_exit import close_all
from unisono.control.sockets import secret_bytes
from unisono.core import clock
from unisono.core.frames import HEAD_BYTES, FrameChannel, Kind
from unisono.errors import AbortedError, CommTimeoutError, PeerLostError
from unisono.host.mpi_library import check_world, has_ulfm, launched, library, name_of
from unisono.host.network import address_for_others, address_outward, host_identity

__all__ = [
    "PREFIXES",
    "START",
    "VARIABLES",
    "MpiAbortGuard",
    "check",
    "detected",
    "find",
    "find_on",
    "job_end",
    "launched",
]

VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK")
PREFIXES = ()
"""Empty: `env_without_launcher` removes the launcher's variables, and keeps the user's settings."""
START = "mpirun -n 2 python train.py"

_TAG = 23041
_MAX_BYTES = 4096
_GRACE_S = 2.0


def detected(_request: InitRequest) -> bool:
    """Return whether an MPI launcher has started this process together with other processes."""
    found = launched()
    return found is not None and found.size != 1


def check(_request: InitRequest) -> None:
    """Do nothing: MPI itself provides rank and size."""


def find(request: InitRequest) -> Rendezvous:
    """Return the rendezvous for the ranks of MPI's world.

    Raises:
        UnavailableError: mpi4py or its MPI library is missing, or the library does not match the launcher.
        CommTimeoutError: Not all ranks called `init` in time; rank 0's error names the missing ranks.
    """
    started = launched()
    if started is not None:
        request.rank = started.rank
        request.size = started.size
    mpi = library()
    check_world(mpi, (started and started.size) or 1)
    world = mpi.COMM_WORLD
    rank = request.rank = world.Get_rank()
    size = request.size = world.Get_size()
    source = f"rank {rank} of {size} from {name_of(mpi)}"
    if size == 1:
        return replace(alone(request), source=f"{source}: a world of one")
    end = job_end(mpi, rank, size)
    rendezvous = find_on(world, source, request.deadline, request.secret)
    rendezvous.network = "mpi"
    end.await_closing(rendezvous)
    # This MPI collective has no timeout, but all ranks have joined, so it cannot block for long.
    node = world.Split_type(mpi.COMM_TYPE_SHARED, rank)
    rendezvous.local_rank = node.Get_rank()
    node.Free()
    return rendezvous


def find_on(comm: Any, source: str, deadline: float, secret: str | bytes | None = None) -> Rendezvous:
    """Return the rendezvous of an MPI communicator's ranks, all of which must call this function.

    Args:
        comm: An MPI communicator on which no receive with any tag is posted.
        source: As for `Rendezvous`.
        deadline: Time by which all ranks must have joined, on the library's clock.
        secret: The shared secret; if None, rank 0 generates one.
    """
    claim = RankClaim(comm.Get_rank(), comm.Get_size(), None, deadline, source, restarts=False)
    # Check the secret on every rank, because every rank must reject an invalid value.
    known = secrets.token_hex(32).encode() if secret is None else secret_bytes(secret)
    exchange = _HelloExchange(comm, claim)
    if claim.rank == 0:
        held = acquire(f"mpi/{secrets.token_hex(8)}", known, _address(exchange.collect()), 0, restarts=False)
        exchange.send((*held.server.address, known), range(1, claim.size))
        rendezvous = meet(claim, held.server.address, known, held)
    else:
        host, port, known = exchange.receive()
        rendezvous = meet(claim, (host, port), known)
    rendezvous.source += f", rendezvous at {rendezvous.address}"
    return rendezvous


def _address(hosts_by_rank: list[tuple[str, str]]) -> str:
    """Return an address at which all ranks can reach this host.

    Args:
        hosts_by_rank: Identity and name of each rank's host; the first host is this host, because this rank is rank 0.
    """
    other_hosts = [name for host, name in hosts_by_rank if host != hosts_by_rank[0][0]]
    if not other_hosts:
        return "127.0.0.1"
    try:
        return address_for_others(other_hosts[0])
    except OSError:
        # The other host's name cannot be resolved.
        outward = address_outward()
        if outward is None:
            raise
        return outward


@dataclass(frozen=True, slots=True)
class _HelloExchange:
    """Sends short messages from all ranks to rank 0 and back, with a time limit and without pickle."""

    comm: Any
    claim: RankClaim

    def collect(self) -> list[tuple[str, str]]:
        """On rank 0, collect every rank's host. If ranks are missing, notify the other ranks and raise an error."""
        mine = (host_identity(), socket.gethostname())
        memory = {rank: bytearray(_MAX_BYTES) for rank in range(1, self.claim.size)}
        waiting = {rank: self.comm.Irecv([memory[rank], _byte()], rank, _TAG) for rank in memory}
        if not clock.poll_until(lambda: _all_done(waiting), self.claim.deadline, spins=1):
            missing = sorted(waiting)
            for request in waiting.values():
                request.Cancel()
                request.Free()
            self.send(("missing", missing), [rank for rank in memory if rank not in missing])
            raise self._missing(missing)
        return [mine, *(_read(memory[rank]) for rank in memory)]

    def receive(self) -> tuple[str, int, bytes]:
        """Send this rank's host to rank 0, and return rank 0's address."""
        self.send((host_identity(), socket.gethostname()), [0])
        memory = bytearray(_MAX_BYTES)
        waiting = {0: self.comm.Irecv([memory, _byte()], 0, _TAG)}
        # Wait a little longer than the deadline: rank 0 waits until its own deadline before it reports missing ranks.
        if not clock.poll_until(lambda: _all_done(waiting), self.claim.deadline + _GRACE_S, spins=1):
            waiting[0].Cancel()
            waiting[0].Free()
            raise self._missing([0])
        address = _read(memory)
        if address[0] == "missing":
            raise self._missing(address[1])
        host, port, secret = address
        return host, port, secret

    def send(self, message: object, ranks: Iterable[int]) -> None:
        """Send a message, and wait until the ranks have received it, or until shortly after the deadline."""
        data = FrameChannel().encode(Kind.HELLO, serialization.encode(message))
        # The messages are so short that MPI buffers them, so their memory can be reused before they are received.
        sent = {rank: self.comm.Isend([data, _byte()], rank, _TAG) for rank in ranks}
        clock.poll_until(lambda: _all_done(sent), self.claim.deadline + _GRACE_S, spins=1)

    def _missing(self, ranks: list[int]) -> CommTimeoutError:
        listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        return CommTimeoutError(
            f"rank {listed} of the {self.claim.size} that the launcher started did not call init in time. "
            "Is it alive, and does every rank call init?",
            peer=ranks[0],
        )


def _byte() -> Any:
    return library().BYTE


def _all_done(waiting: dict[int, Any]) -> bool:
    """Drop completed requests; return whether all are complete."""
    for rank, request in list(waiting.items()):
        if request.Test():
            del waiting[rank]
    return not waiting


def _read(memory: bytearray) -> Any:
    channel = FrameChannel(most_bytes=_MAX_BYTES - HEAD_BYTES)
    channel.feed(memory)
    frame = channel.next(Kind.HELLO)
    assert frame is not None
    return serialization.decode(frame.content)


def job_end(mpi: Any, rank: int, size: int) -> MpiAbortGuard:
    """Install hooks that abort the job if this process ends with an uncaught exception or a nonzero `sys.exit`."""
    known = getattr(sys.excepthook, "__self__", None)
    if isinstance(known, MpiAbortGuard):
        return known
    made = MpiAbortGuard(mpi, rank, size)
    sys.excepthook = made.fail
    sys.exit = made.leave
    return made


class MpiAbortGuard:
    """Replacement for `sys.excepthook` and `sys.exit` that aborts the MPI job.

    Args:
        mpi: The module.
        rank, size: This process's rank in MPI's world, and the world's size.
    """

    def __init__(self, mpi: Any, rank: int, size: int) -> None:
        self._mpi = mpi
        self._who = f"rank {rank} of {size}"
        self._process = os.getpid()
        self._open = 0
        self._excepthook = sys.excepthook

    def await_closing(self, rendezvous: Rendezvous) -> None:
        """Count `rendezvous` as open until it is closed, because other ranks may be waiting for this process."""
        self._open += 1
        rendezvous.on_close.callback(self._note_closed)

    def _note_closed(self) -> None:
        self._open -= 1

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the error as `sys.excepthook` does, then abort the job."""
        if self._over():
            self._excepthook(kind, error, trace)
            return
        if isinstance(error, PeerLostError | AbortedError):
            # If another rank's failure caused this rank's error, give the other rank time to report its own error and
            # abort the job first.
            self._excepthook(kind, error, trace)
            time.sleep(_GRACE_S)
            sys.stderr.write(f"{self._who} ends the job\n")
        else:
            sys.stderr.write(f"{self._who} ends the job:\n")
            self._excepthook(kind, error, trace)
        self._end(1)

    def leave(self, status: Any = None, /) -> NoReturn:
        """Exit as `sys.exit` does.

        If communicators are open, and the `SystemExit` is never caught, the whole job is aborted.
        """
        raise SystemExit(status) if status in (None, 0) or not self._open else _Exit(status, self._uncaught)

    def _uncaught(self, status: object) -> None:
        if not self._over():
            sys.stderr.write(f"{self._who} ends the job by sys.exit({status!r})\n")
            # An exit status that is not an integer has been printed above, and means exit code 1, as in `sys.exit`.
            self._end(status & 0xFF or 1 if isinstance(status, int) else 1)

    def _over(self) -> bool:
        # If a program catches the SystemExit and keeps it, `__del__` runs only during interpreter shutdown, and must
        # not abort the job.
        return os.getpid() != self._process or sys.is_finalizing() or self._mpi.Is_finalized()

    def _end(self, status: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if has_ulfm():
            # The user has enabled ULFM, so end only this rank; the other ranks are notified.
            close_all()
            os._exit(status)
        self._mpi.COMM_WORLD.Abort(status)


class _Exit(SystemExit):
    """SystemExit that notices whether it ends the process.

    Python does not call `sys.excepthook` for a `SystemExit`. However, if the exception ends the process, Python frees
    the exception only after all code has returned, so `__del__` has no calling frame.
    """

    def __init__(self, status: object, uncaught: Callable[[object], None]) -> None:
        super().__init__(status)
        self._uncaught = uncaught

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            self._uncaught(self.code)
