"""Replacements: ranks that are started for lost ones. Each is alone at first, and joins the others when it rebuilds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from unisono import serialization
from unisono.communicator import Communicator
from unisono.control.client import SocketControl
from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.failure import to_cause
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.core.work import seconds_left
from unisono.errors import AbortedError, CommError, MismatchError, PeerLostError
from unisono.launcher.job import Outcome
from unisono.transports.hierarchical import transport_named

__all__ = ["Attempts", "admitted", "joined", "replacement"]

_log = logging.getLogger("unisono")

_MOST_UNJOINED = 2


def joined(rank: int, attempt: int) -> str:
    """Return the key of the control plane that is set when a replacement has joined the others."""
    return f"joined/{rank}/{attempt}"


class Attempts:
    """Starts of each rank.

    A lost rank is started again, unless two of its replacements in a row have not joined, or no rank is left to admit
    another one.

    Args:
        size: Number of ranks.
        control: The control plane of the ranks; None if lost ones are not replaced.
        start: Starts a rank; its second argument is 1 for the first replacement.

    Attributes:
        last: For each rank the number of its last start: 0 is the first.
        open: The ranks that have not ended.
    """

    def __init__(self, size: int, control: ControlPlane | None, start: Callable[[int, int], None]) -> None:
        self._control = control
        self._start = start
        self._unjoined = [0] * size
        self.last: list[int] = [0] * size
        self.open: set[int] = set(range(size))

    def settle(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcome of a rank, with those of replacements that no rank is left to admit.

        None if the rank was lost and is started again. An error that ends a rank ends the job, so no rank is started
        again afterwards.
        """
        rank = outcome.rank
        if rank not in self.open:
            return []
        self.open.remove(rank)
        if not outcome.reported and self._may_start_again(rank):
            self.open.add(rank)
            self.last[rank] += 1
            self._start(rank, self.last[rank])
            return []
        if outcome.error is not None:
            self.stop()
        if self._control is None or any(map(self._has_joined, self.open)):
            return [outcome]
        message = "was lost, and the other ranks ended before a replacement had joined them"
        size = len(self.last)
        errors = {each: PeerLostError(f"rank {each} of {size} {message}", peer=each) for each in self.open}
        self.open.clear()
        return [outcome, *(Outcome(each, error=error, reported=False) for each, error in errors.items())]

    def stop(self) -> None:
        """Start no rank again from now on."""
        self._control = None

    def _may_start_again(self, rank: int) -> bool:
        if self._control is None or not any(map(self._has_joined, self.open)):
            return False
        self._unjoined[rank] = 0 if self._has_joined(rank) else self._unjoined[rank] + 1
        return self._unjoined[rank] < _MOST_UNJOINED

    def _has_joined(self, rank: int) -> bool:
        """Return whether a rank is one of the first, or has joined them."""
        assert self._control is not None
        return not self.last[rank] or self._control.check([joined(rank, self.last[rank])])


def replacement(
    control: SocketControl,
    rank: int,
    attempt: int,
    options: Options,
    wrap: Callable[[Transport], Transport] | None,
    on_joined: Callable[[Communicator], None] = lambda comm: None,
) -> Communicator:
    """Return a communicator of a replacement alone, whose `rebuild` joins the ranks of the job.

    Args:
        control: This rank's handle to the job's control plane, which the communicator closes at its end.
        rank, attempt: The rank that was lost, and the number of this start of it.
        options: For the communicator of one; the job's come from its ranks, but for the device.
        wrap: Applied to the transport of the job.
        on_joined: Called with the communicator of the job.
    """

    def admission(deadline: float) -> Communicator:
        def note(comm: Communicator) -> None:
            control.set(joined(rank, attempt), b"")
            on_joined(comm)

        return admitted(control, deadline, options.device, wrap, note)

    group = Group.world(0, 1, f"replacement{rank}.{attempt}")
    alone = replace(options, backend="thread", hosts=None)
    comm = Communicator(transport_named("thread").connect(group, control, alone), control, alone, admission=admission)
    comm.after_close(control.close)
    return comm


def admitted(
    control: SocketControl,
    deadline: float,
    device: str,
    wrap: Callable[[Transport], Transport] | None,
    on_joined: Callable[[Communicator], None] = lambda comm: None,
) -> Communicator:
    """Return the communicator of a running job whose ranks rebuild it, with this one among them.

    Applies until it goes well: ranks may be lost while the new communicator is made, and then all try again.

    Args:
        control: A handle to the job's control plane.
        deadline: On the library's clock.
        device: Of this rank's tensors.
        wrap: Applied to the transport.
        on_joined: Called with the communicator before any rank returns from `rebuild`.

    Raises:
        CommTimeoutError: The ranks have not called `rebuild` with `grow` or `size`.
        CommError: The communicator cannot be made.
    """
    while True:
        rebuilt, rank, terms = control.request_admission(seconds_left(deadline))
        backend, default_s, heartbeat_s, chunk_bytes, deterministic, check = serialization.decode(terms)
        group = Group(rebuilt.name, rank, rebuilt.members)
        settings = Options(backend, device, default_s, control.local_host, chunk_bytes, deterministic)
        options = replace(settings, heartbeat_s=heartbeat_s)
        _log.info("unisono: rank %d of %d, joined %s", rank, group.size, group.name)
        control.join(group)
        try:
            transport = transport_named(backend).connect(group, control, options)
            comm = Communicator(wrap(transport) if wrap else transport, control, options, check=check)
            on_joined(comm)
            control.exchange(group, "rebuilt", None, max(1.0, deadline - clock.now()))
        except BaseException as error:
            control.report_failure(group, to_cause(error, rank, "join"))
            control.leave(group)
            again = isinstance(error, CommError) and not isinstance(error, AbortedError | MismatchError)
            if not again or clock.now() > deadline:
                raise
        else:
            return comm
