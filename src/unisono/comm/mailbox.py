"""Opening of a mailbox for a communicator's ranks, and its detection of lost peers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.comm.engine import Engine
from unisono.comm.point_to_point_mailbox import PointToPointMailbox
from unisono.core.failure import Cause, error_of, to_cause
from unisono.core.group import Group
from unisono.core.transport import Mailbox
from unisono.wrappers.consistency import Checked

__all__ = ["open_mailbox"]


def open_mailbox(engine: Engine, number: int, metadata: Any) -> tuple[Mailbox, list[Any]]:
    """Return a mailbox, and the metadata that each rank passed. Collective.

    Args:
        engine: Of the communicator.
        number: Number of the mailbox among the communicator's.
        metadata: As of `Communicator.mailbox`.
    """
    control, timeout = engine.control, engine.options.timeout_s
    group = engine.group.child(f"mail{number}", range(engine.group.size))
    transport = engine.transport.inner if isinstance(engine.transport, Checked) else engine.transport
    control.join(group)
    pairs: list[Group] = []
    box: Mailbox | None = None
    try:
        # All ranks join before any allocation, so that no rank waits for memory of a missing one.
        cards = control.exchange(group, "cards", metadata, timeout)
        box = transport.mailbox(group)
        if box is None:
            box = PointToPointMailbox(transport.split(group))
        for peer in range(group.size):
            if peer != group.rank:
                pairs.append(_pair(group, peer))
                control.join(pairs[-1], _loser(box, peer, group))
        control.exchange(group, "mailboxes", None, timeout)
    except BaseException as error:
        if box is not None:
            box.close()
        for pair in pairs:
            control.leave(pair)
        control.report_failure(group, to_cause(error, group.rank, "mailbox"))
        raise
    finally:
        control.leave(group)
    # The open mailbox holds the engine, and by that the control plane, whatever becomes of the communicator.
    box.on_close(partial(_leave, engine, pairs))
    return box, cards


def _pair(group: Group, peer: int) -> Group:
    """Return a group of two ranks: it fails when one of them ends, without effect on other ranks."""
    low, high = sorted((group.rank, peer))
    return group.child(f"{low}-{high}", (low, high))


def _leave(engine: Engine, pairs: Sequence[Group]) -> None:
    for pair in pairs:
        engine.control.leave(pair)


def _loser(box: Mailbox, peer: int, group: Group) -> Callable[[Cause], None]:
    known = weakref.ref(box)

    def lose(cause: Cause) -> None:
        box = known()
        if box is None:
            return
        # In the pair ranks are 0 and 1, so the cause's own text would name the wrong ones.
        told = Cause(
            "PeerLostError", peer, f"rank {peer} was lost: its process ended or failed, or the connection to it broke"
        )
        box.mark_lost(peer, error_of(told, group))

    return lose
