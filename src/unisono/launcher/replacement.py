"""Replacements for lost ranks. A replacement starts with a one-rank communicator, and joins the job with `rebuild`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from unisono import serialization
from unisono.communicator import Communicator
from unisono.control.client import SocketControl
from unisono.core import clock
from unisono.core.failure import to_cause
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.core.work import seconds_left
from unisono.errors import AbortedError, CommError, MismatchError
from unisono.launcher.supervisor import joined
from unisono.transports.hierarchical import transport_named

__all__ = ["admitted", "replacement"]

_log = logging.getLogger("unisono")


def replacement(
    control: SocketControl,
    rank: int,
    attempt: int,
    options: Options,
    wrap: Callable[[Transport], Transport] | None,
    on_joined: Callable[[Communicator], None] = lambda comm: None,
) -> Communicator:
    """Return a one-rank communicator for a replacement rank; its `rebuild` joins the job's ranks.

    Args:
        control: This rank's handle to the job's control plane; closing the communicator also closes this handle.
        rank, attempt: The lost rank, and the number of times it has been started before.
        options: Options for the one-rank communicator. After joining the job, this rank keeps only the device, and
            receives all other options from the job's ranks.
        wrap: Function applied to the job's transport.
        on_joined: Called with the job's communicator when this rank has joined.
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
    """Join a running job, and return its communicator, which the job's ranks rebuild to include this rank.

    If ranks are lost while the new communicator is created, all ranks try again until the deadline.

    Args:
        control: A handle to the job's control plane.
        deadline: Deadline on the library's clock, `unisono.core.clock`.
        device: Device of this rank's tensors.
        wrap: Function that wraps the transport.
        on_joined: Called with the communicator before any rank returns from `rebuild`.

    Raises:
        CommTimeoutError: The ranks did not call `rebuild` with `grow` or `size`.
        CommError: The communicator cannot be created.
    """
    while True:
        rebuilt, rank, terms = control.request_admission(seconds_left(deadline))
        backend, default_s, heartbeat_s, chunk_bytes, deterministic, check = serialization.decode(terms)
        group = Group(rebuilt.name, rank, rebuilt.members)
        options = Options(
            backend,
            device,
            default_s,
            control.local_host,
            chunk_bytes,
            deterministic=deterministic,
            heartbeat_s=heartbeat_s,
        )
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
