"""Transport over MPI, through mpi4py, for ranks started with mpirun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from unisono.bootstrap.mpi import find_on
from unisono.control.encryption import refuse_unencrypted
from unisono.core import clock
from unisono.core.call import Call, Fingerprint
from unisono.core.control import ControlPlane, raise_mismatch
from unisono.core.failure import Cause, error_of, left_error
from unisono.core.group import Group
from unisono.core.staging import ACCELERATORS
from unisono.core.transport import FastPath, Options, Transport
from unisono.core.types import COLLECTIVE_TAG, Message, PointToPoint, Recv, Send, Work
from unisono.core.work import Completion, Deferred, seconds_left
from unisono.diagnostics.hang_report import hang_report
from unisono.diagnostics.tracebacks import show_errors
from unisono.errors import ClosedError, CommError, PeerLostError, UnavailableError
from unisono.host.mpi_library import check_world, library
from unisono.host.processors import cores
from unisono.transports.mpi.collectives import NATIVE, MpiCollectives, carries, too_long
from unisono.transports.mpi.communicators import CommHandle, MpiCommunicators
from unisono.transports.mpi.consistency import MpiAgreement, word_of
from unisono.transports.mpi.fast_path import MpiFastPath
from unisono.transports.mpi.point_to_point import LAST_LOOKS, MpiMessages
from unisono.transports.mpi.watchdog import Watchdog

__all__ = ["TRANSPORT", "MpiTransport", "adopt"]

_LOOK_EVERY_S = 0.2
_SPINS = 1000
_CROWDED_SPINS = 5


class MpiTransport(Transport):
    """Transport that uses MPI's messages and collectives directly on the tensors' memory.

    Before each blocking MPI collective, a 24-byte all-reduce with a timeout shows whether all ranks have reached the
    same call. CUDA tensors are staged in pinned memory.

    Args:
        group: The group of ranks.
        comms: The MPI communicators of the group's ranks.
        control: This rank's handle to the control plane.
        options: Options, as passed to `connect`.
    """

    launcher = "mpirun"
    native = NATIVE
    any_source = checks = True
    devices: frozenset[str] = ACCELERATORS | {"cpu"}
    host_staged = ACCELERATORS
    latency_s: float = 3e-6
    second_per_byte: float = 2e-10

    def __init__(self, group: Group, comms: MpiCommunicators, control: ControlPlane, options: Options) -> None:
        self.group = group
        self._comms = comms
        self._control = control
        self._options = options
        self._looked_s = 0.0
        self._left_ranks: set[int] = set()
        spins = _CROWDED_SPINS if group.size > cores() else _SPINS
        self._messages = MpiMessages(comms, options.timeout_s, self._look, spins)
        self._agreement = MpiAgreement(comms, self._look, spins)
        self._watch = Watchdog(comms, self._give_up)
        self._native = MpiCollectives(comms, self._watch)
        self.fast_path: FastPath | None = MpiFastPath(self._agreement, self._run, group.rank, group.size, self._differ)

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> MpiTransport:
        mpi = library()
        check_world(mpi, group.size)
        if group.size == 1:
            return cls(
                group, MpiCommunicators(CommHandle.create(mpi.COMM_SELF, [0], 0), [0], group.name), control, options
            )
        refuse_unencrypted("mpi")
        world = mpi.COMM_WORLD
        control.join(group)
        numbers = control.exchange(group, "MPI's world", (world.Get_rank(), world.Get_size()), options.timeout_s)
        ranks = [rank for rank, _ in numbers]
        sizes = {size for _, size in numbers}
        if len(set(ranks)) < len(ranks) or len(sizes) > 1:
            raise UnavailableError(
                f"these {group.size} ranks are not in one MPI world (their ranks in it: {ranks}, its sizes: "
                f"{sorted(sizes)}); start all of them with one mpirun"
            )
        if group.size < world.Get_size():
            base = CommHandle.create(world, ranks, 0)
            ranks = list(range(group.size))
        else:
            base = CommHandle.dup(world, clock.now() + options.timeout_s)
        return cls(group, MpiCommunicators(base, ranks, group.name), control, options)

    def split(self, group: Group) -> MpiTransport:
        ranks = [self.group.members.index(member) for member in group.members]
        return MpiTransport(group, self._comms.part(ranks, group.name), self._control, self._options)

    def reconfigure(self, group: Group) -> MpiTransport:
        def union(mine: list[int]) -> set[int]:
            return {rank for known in self._control.exchange(group, "MPI's dead", mine, timeout) for rank in known}

        timeout = self._options.timeout_s
        self._control.join(group)
        ranks = [self.group.members.index(member) for member in group.members]
        comms = self._comms.renewed(ranks, group.name, union)
        return MpiTransport(group, comms, self._control, self._options)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        if self._comms.broken is not None:
            return Completion.ended(self._comms.broken)
        for message in batch:
            if message.tag > self._comms.largest_tag:
                raise ValueError(
                    f"tag={message.tag} is larger than this MPI allows; use tags up to {self._comms.largest_tag}"
                )
        return self._messages.post(batch)

    def iprobe(self, peer: int, tag: int) -> bool:
        if self._messages.iprobe(peer, tag):
            return True
        try:
            self._look([peer])
        except PeerLostError:
            # Probe again, because the peer may have sent the message before it left.
            if any(self._messages.iprobe(peer, tag) for _ in range(LAST_LOOKS)):
                return True
            raise
        return False

    # -- collectives ---------------------------------------------------------------------------
    def supports(self, call: Call) -> bool:
        return call.name in self.native and carries(call, self.size)

    def compare(self, call: Call, deadline: float) -> None:
        """Return once all ranks have reached this call; raise an error if their calls differ."""
        fingerprint = call.fingerprint
        word = word_of(fingerprint)
        sends = fingerprint.sends
        receives = fingerprint.receives
        if sends or receives:
            rows = self._agreement.rows_of(sends, receives)
            count = int(too_long(sends, receives, fingerprint.dtype))
        else:
            rows = count = 0
        if not self._agreement.check(word, deadline, rows, count):
            self._differ(fingerprint)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        if call.steps is not None:
            return super().run(call, over)
        return Deferred(partial(self._run, call), call.timeout)

    def _run(self, call: Call, deadline: float) -> None:
        if call.name != "all_to_all" or not self._agreement.counted:
            self._native.carry(call, deadline)
            return
        # At least one rank has more bytes to move than one MPI call can carry. Use point-to-point messages, which are
        # split if they are too long.
        others = [rank for rank in range(self.size) if rank != self.rank]
        call.outputs[self.rank].copy_(call.inputs[self.rank])
        batch: list[Message] = [Recv(call.outputs[rank], rank, COLLECTIVE_TAG) for rank in others]
        batch += [Send(call.inputs[rank], rank, COLLECTIVE_TAG) for rank in others]
        self.post(batch).wait(seconds_left(deadline))

    def _differ(self, mine: Fingerprint) -> NoReturn:
        """Raise an error that quotes each rank's call. All ranks must already know that their calls differ."""
        topic = f"mismatch in call {self._agreement.number}"
        raise_mismatch(self._control, self.group, topic, mine, self._options.timeout_s)

    # -- long waits ----------------------------------------------------------------------------
    def _look(self, peers: Sequence[int]) -> None:
        """Move messages during a long wait; raise an error if this transport is broken or one of the peers has left."""
        if self._comms.broken is not None:
            raise self._comms.broken
        self._messages.move()
        now = clock.now()
        if now >= self._looked_s + _LOOK_EVERY_S:
            self._looked_s = now
            with suppress(ClosedError):
                if self._control.check([self._left()]):
                    here = set(range(self.size)) - self._left_ranks
                    self._left_ranks |= {rank for rank in here if self._control.check([self._left(rank)])}
        for peer in peers:
            if peer in self._left_ranks:
                raise left_error(peer)

    def _left(self, rank: int | None = None) -> str:
        """Return the control plane's key for "rank `rank` has left", or for "some rank has left" if `rank` is None."""
        return f"{self.group.name}/MPI left" + ("" if rank is None else f" {rank}")

    def _give_up(self) -> None:
        """Abort because a collective has begun on all ranks, but not ended in time. Called by the watchdog."""
        text = f"rank {self.rank} gave up: all ranks had reached a collective, which then did not end in time"
        # Report the failure here: the thread inside the collective may never return.
        hang = hang_report(self._control, self.group)
        about = hang.missing[0] if hang.missing else self.rank
        text += f": {hang.verdict}{hang.report}" if hang.missing else hang.report
        first = self._control.report_failure(self.group, Cause("CommTimeoutError", about, text))
        self.abort(error_of(first, self.group))

    # -- end -----------------------------------------------------------------------------------
    def leave(self) -> None:
        if self._comms.broken is None and self.size > 1:
            with suppress(CommError):
                self._control.set(self._left(self.rank), b"")
                self._control.set(self._left(), b"")

    def close(self) -> None:
        if self._comms.mpi.Is_finalized() or isinstance(self._comms.broken, ClosedError):
            return
        self._free()
        self._comms.broken = self._comms.broken or ClosedError("the communicator is closed")
        self._messages.end(self._comms.broken)

    def __del__(self) -> None:
        if "_messages" in self.__dict__ and not self._comms.mpi.Is_finalized():
            self._free()

    def _free(self) -> None:
        """Release MPI's communicators, unless a call may be in progress in them."""
        if self._comms.broken is None and self._messages.idle:
            self._comms.free()

    def abort(self, cause: BaseException) -> None:
        if self._comms.broken is None:
            self._comms.broken = cause
        self._messages.end(cause)
        if self._comms.deadline is not None:
            # Only revoking the communicators ends a collective that has begun.
            self._comms.revoke(cause)


TRANSPORT = MpiTransport


def adopt(
    comm: Any, timeout_s: float, chunk_bytes: int
) -> tuple[MpiTransport, ControlPlane, Options, Callable[[], None]]:
    """Return this rank's transport, control handle and options, and a function that closes the control plane.

    Messages use private communicators of `comm`'s ranks, so that they never match messages that the caller sends on
    `comm`. Rank 0 hosts the control plane, and broadcasts its address and secret over a private communicator.

    Raises:
        TypeError: `comm` is not an mpi4py communicator.
        ValueError: `comm` is not an intracommunicator, or is null.
    """
    mpi = library()
    show_errors(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    if not isinstance(comm, mpi.Comm):
        raise TypeError(f"comm must be a communicator of mpi4py, such as MPI.COMM_WORLD, not {type(comm).__name__}")
    if comm == mpi.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this process is not in it; only its members call from_mpi")
    if comm.Is_inter():
        raise ValueError("comm is an intercommunicator; merge its two groups first: comm.Merge()")
    rank = comm.Get_rank()
    size = comm.Get_size()
    deadline = clock.now() + timeout_s
    base = CommHandle.dup(comm, deadline)
    rendezvous = find_on(base.comm, f"rank {rank} of {size} of an MPI communicator", deadline)
    try:
        options = Options("mpi", "cpu", timeout_s, rendezvous.address, chunk_bytes)
        comms = MpiCommunicators(base, range(size), rendezvous.name)
        transport = MpiTransport(Group.world(rank, size, rendezvous.name), comms, rendezvous.control, options)
    except BaseException:
        rendezvous.close()
        raise
    return transport, rendezvous.control, options, rendezvous.close
