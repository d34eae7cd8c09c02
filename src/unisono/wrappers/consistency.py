"""Compares all ranks' collectives before or while data is transferred, and optionally the data that arrives."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from unisono.core import clock
from unisono.core.call import Call, Fingerprint
from unisono.core.collective import COLLECTIVES, FAMILIES, Collective
from unisono.core.control import ControlPlane, compare_in_full
from unisono.core.group import Group
from unisono.core.staging import digest
from unisono.core.transport import Options, Transport
from unisono.core.types import COLLECTIVE_TAG, Message, PointToPoint, Recv, Work
from unisono.core.work import ChainedWork
from unisono.errors import ClosedError, CommError, CorruptedError
from unisono.wrappers.base import Wrapper
from unisono.wrappers.later_comparison import LaterComparison, Report

__all__ = ["Checked", "Comparer", "Connect"]

_log = logging.getLogger("unisono")

_DIGEST = struct.Struct("<Q")
_BEFORE = frozenset(name for name, collective in COLLECTIVES.items() if collective.returns or not collective.moves)
"""Collectives that are always compared before they run: barriers, and collectives whose results this library reads."""
_CONNECT_S = 5.0
"""Seconds within which a group's ranks must connect. The limit is short: a firewall may drop packets silently."""


class Comparer(Protocol):
    """Compares the calls of a group's ranks."""

    def compare(self, fingerprint: Fingerprint, deadline: float, *, shapes: bool = False) -> None:
        """Wait until all ranks have made the same call; raise `MismatchError` on all ranks if their calls differ."""

    def leave(self) -> None:
        """Notify peers that this rank has left, if they are waiting for it."""

    def end(self, cause: BaseException) -> None:
        """End every wait with an error. Callable from any thread."""

    def close(self) -> None:
        """Close the connections."""


Connect = Callable[[Group, ControlPlane, Options], Comparer]
"""Function that creates a `Comparer`. Collective."""


class Checked(Wrapper):
    """Exchanges fingerprints before every collective, and raises `MismatchError` on all ranks if they differ.

    If the transport has `compares_later` set, only some calls wait for the exchange: the first call, barriers, calls
    that algorithms run with messages, and calls whose result the library itself reads. A thread compares all other
    calls while they run.

    Cost: about 25 us per collective on one host. Each collective sends log2(p) short messages over connections that the
    first collective opens; if these connections fail, the collective makes a round trip to the control plane instead.
    Point-to-point messages cost nothing. With `full`, ranks also compare shapes and, after each collective, the hashes
    of inputs and outputs, which takes another round trip to the control plane. If hashes differ, all ranks raise
    `CorruptedError`. The hash of a sum is not known in advance, so ranks only check that they all have the same sum.
    With `full`, a point-to-point message costs the sender one request to the control plane, and the receiver two.

    Args:
        inner: The transport to check.
        control: Handle to the control plane.
        options: The communicator's options, which contain the timeout and this host's address.
        connect: Function that opens the connections over which a group's calls are compared. If None, calls are
            compared through the control plane.
        full: Whether to also compare shapes and contents.
        report: Function that reports the error of a comparison that runs while the compared call does. If None, all
            calls wait for their comparison.
    """

    def __init__(
        self,
        inner: Transport,
        control: ControlPlane,
        options: Options,
        connect: Connect | None = None,
        *,
        full: bool = False,
        report: Report | None = None,
    ) -> None:
        super().__init__(inner)
        self._control = control
        self._options = options
        self._connect = connect
        self.full = full
        self._comparer: Comparer | None = None
        self._report = report if inner.compares_later and not full else None
        self._later: LaterComparison | None = None
        self.native: frozenset[str] = inner.native
        # Calls that wait for their comparison overlap poorly: an asynchronous call waits in a thread, and progresses
        # slowly.
        self.overlaps: bool = inner.overlaps and self._report is not None
        self.checks = True
        self._counted: Counter[tuple[bool, int, int, int]] = Counter()

    def wrap_child(self, inner: Transport) -> Checked:
        return Checked(inner, self._control, self._options, self._connect, full=self.full)

    def compare(self, call: Call, deadline: float) -> None:
        if self._later is not None:
            if call.steps is None and call.fingerprint.operation not in _BEFORE:
                # Don't call `super().compare`: this method is only called if the inner transport does not compare calls
                # itself.
                self._later.add(call.fingerprint, deadline)
                return
            self._later.settle()
        if self._comparer is not None:
            self._comparer.compare(call.fingerprint, deadline, shapes=self.full)
        else:
            self._compare_by_control_plane(call.fingerprint, deadline)
            # Connecting is collective, and is possible now, because all ranks are known to be in this call.
            self._comparer = self._connected()
            self._connect = None
            if self._comparer is not None and self._report is not None:
                name = f"unisono comparison {self.group.name} rank {self.rank}"
                self._later = LaterComparison(self._comparer.compare, self._report, name)
        super().compare(call, deadline)

    def plain(self) -> Transport | None:
        return None if self.full else self.inner.plain()

    def starts(self, call: Call) -> bool:
        return self._later is not None and call.fingerprint.operation not in _BEFORE and self.inner.starts(call)

    def settle(self) -> None:
        if self._later is not None:
            self._later.settle()
        super().settle()

    def _compare_by_control_plane(self, fingerprint: Fingerprint, deadline: float) -> None:
        topic = _topic(fingerprint)
        left = deadline - clock.now()
        if not (fingerprint.sends or fingerprint.receives):
            mine = fingerprint.compared(shapes=self.full)
            if self._control.exchange_unless_equal(self.group, topic, mine, left) is None:
                return
            topic = f"{topic} in full"
        compare_in_full(self._control, self.group, topic, fingerprint, left, shapes=self.full)

    def _connected(self) -> Comparer | None:
        """Return the `Comparer` for all further calls; if any rank could not connect, return None on all ranks."""
        if self._connect is None:
            return None
        comparer: Comparer | None = None
        try:
            comparer = self._connect(self.group, self._control, replace(self._options, timeout_s=_CONNECT_S))
        except CommError as error:
            _log.info("unisono: calls are compared over the control plane: %s", error)
        if all(self._control.exchange(self.group, "connections", comparer is not None, self._options.timeout_s)):
            return comparer
        if comparer is not None:
            comparer.close()
        return None

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        work = super().run(call, over)
        collective = FAMILIES[call.name]
        # The hash of a sum cannot be computed from the hashes of its terms, so results of a reduction can only be
        # compared with each other, which requires that all ranks receive the sum.
        if not self.full or not collective.moves or (collective.reduces and not collective.same_everywhere):
            return work
        return ChainedWork(work, lambda: self._compare_results(call, collective))

    def _compare_results(self, call: Call, collective: Collective) -> None:
        given = [digest(tensor) for tensor in call.inputs]
        taken = [digest(tensor) for tensor in call.outputs]
        operation = call.fingerprint.operation
        topic = f"{_topic(call.fingerprint)}, its results"
        rows = self._control.exchange(self.group, topic, (given, taken), call.timeout)
        found = _other_than_most(rows) if collective.reduces else _other_than_sent(collective, rows, call.root or 0)
        if found is not None:
            source, target = found
            who = f"rank {target} holds another result of {operation} than rank {source}"
            if call.name != "all_reduce":
                who = f"rank {target} received from rank {source} in {operation} other bytes than it sent"
            raise CorruptedError(f"{who}. Is the memory or the network between the two ranks faulty?", peer=source)

    # -- messages ------------------------------------------------------------------------------
    def post(self, batch: Sequence[Message]) -> Work:
        if not self.full or not batch or batch[0].tag == COLLECTIVE_TAG:
            return super().post(batch)
        received: list[tuple[Message, str]] = []
        for message in batch:
            key = self._key(message)
            if isinstance(message, Recv):
                received.append((message, key))
            else:
                self._control.set(key, _DIGEST.pack(digest(message.tensor)))
        return ChainedWork(super().post(batch), lambda: self._compare_messages(received))

    def _key(self, message: Message) -> str:
        """Return the control-plane key of a message's hash. Sender and receiver compute the key independently."""
        receives = isinstance(message, Recv)
        source, target = (message.peer, self.rank) if receives else (self.rank, message.peer)
        # Count sends and receives separately: for a message to itself, this rank counts both, and they must get the
        # same number.
        stream = receives, source, target, message.tag
        self._counted[stream] += 1
        number = self._counted[stream]
        return f"{self.group.name}/message {number} of tag {message.tag} from {source} to {target}"

    def _compare_messages(self, received: Sequence[tuple[Message, str]]) -> None:
        for message, key in received:
            sent = self._control.get(key, self._options.timeout_s, self.group)
            self._control.delete(key)
            if _DIGEST.unpack(sent)[0] != digest(message.tensor):
                raise CorruptedError(
                    f"a message from rank {message.peer} (tag {message.tag}) holds other bytes than were sent. Is the "
                    "memory or the network between the two ranks faulty?",
                    peer=message.peer,
                    nbytes=message.tensor.nbytes,
                )

    # -- end -----------------------------------------------------------------------------------
    def leave(self) -> None:
        # Finish comparisons before leaving: a comparison without this rank would fail on the other ranks.
        self.settle()
        if self._comparer is not None:
            self._comparer.leave()
        super().leave()

    def close(self) -> None:
        if self._comparer is not None:
            self._comparer.end(ClosedError("the communicator is closed"))
            self._comparer.close()
            self._comparer = None
        if self._later is not None:
            self._later.end()
        super().close()

    def abort(self, cause: BaseException) -> None:
        if self._comparer is not None:
            self._comparer.end(cause)
        super().abort(cause)


def _topic(fingerprint: Fingerprint) -> str:
    # The operation is not part of the key: ranks that call different operations must compare them under the same key.
    return f"call {fingerprint.call}"


_Rows = Sequence[tuple[Sequence[int], Sequence[int]]]
_Found = tuple[int, int] | None


def _other_than_most(rows: _Rows) -> _Found:
    """Return a rank with the most common result and a rank with a different result; None if all results are equal."""
    results = [taken[0] for _, taken in rows]
    usual = max(results, key=results.count)
    return next(((results.index(usual), rank) for rank, result in enumerate(results) if result != usual), None)


def _other_than_sent(collective: Collective, rows: _Rows, root: int) -> _Found:
    """Return the sender and the receiver of data that changed in flight; None if no data changed."""
    for rank, (_, taken) in enumerate(rows):
        for (source, part), received in zip(collective.sources(rank, len(rows), root), taken, strict=True):
            if rows[source][0][part] != received:
                return source, rank
    return None
