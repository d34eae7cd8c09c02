"""Compare what every rank is about to do, over the control plane, before any data moves; and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.buffer_guard import digest
from unisono.core.collective import FAMILIES, Collective
from unisono.core.control import ControlPlane
from unisono.core.fingerprint import Fingerprint, explain
from unisono.core.transport import Transport
from unisono.core.types import CollectiveCall
from unisono.errors import CorruptedError, MismatchError
from unisono.wrappers.base import Wrapper

__all__ = ["Checked"]


class Checked(Wrapper):
    """Every collective starts with one exchange of fingerprints: `MismatchError` on all ranks if they differ.

    Cost: one round trip to the control plane a collective, none a message. With `full`, which compares shapes too, one
    more after it, with hashes of what was given and of what was received: `CorruptedError` on all ranks if they
    differ. A sum has no hash that could be told before; that all ranks hold the same one is compared.

    Args:
        inner: The transport to check.
        control: This rank's handle to the control plane.
        full: Whether to compare contents too.
    """

    def __init__(self, inner: Transport, control: ControlPlane, *, full: bool = False) -> None:
        super().__init__(inner)
        self._control, self.full = control, full
        self.native = inner.native
        self.checks = True

    def wrap_child(self, inner: Transport) -> Checked:
        return Checked(inner, self._control, full=self.full)

    def begin(self, fingerprint: Fingerprint, timeout: float) -> None:
        topic = _topic(fingerprint)
        if fingerprint.sends or fingerprint.receives:
            values = self._control.exchange(self.group, topic, fingerprint.values(), timeout)
        else:
            compared = fingerprint.compared(shapes=self.full)
            if self._control.agree(self.group, topic, compared, timeout) is None:
                return super().begin(fingerprint, timeout)
            values = self._control.exchange(self.group, f"{topic} in full", fingerprint.values(), timeout)
        problem = explain([Fingerprint(*value) for value in values], shapes=self.full)
        if problem:
            raise MismatchError(f"{problem}. Nothing was sent")
        return super().begin(fingerprint, timeout)

    def end(self, fingerprint: Fingerprint, call: CollectiveCall, timeout: float) -> None:
        super().end(fingerprint, call, timeout)
        what = FAMILIES[call.name]
        # A sum has no hash that could be known before: it is compared where all ranks hold it.
        if not self.full or not what.moves or (what.reduces and not what.same_everywhere):
            return
        given = [digest(tensor) for tensor in call.inputs]
        taken = [digest(tensor) for tensor in call.outputs]
        rows = self._control.exchange(self.group, f"{_topic(fingerprint)}, its results", (given, taken), timeout)
        found = _other_than_most(rows) if what.reduces else _other_than_sent(what, rows, call.root or 0)
        if found is not None:
            source, target = found
            who = f"rank {target} holds another result of {fingerprint.operation} than rank {source}"
            if call.name != "all_reduce":
                who = f"rank {target} received from rank {source} in {fingerprint.operation} other bytes than it sent"
            raise CorruptedError(f"{who}. Is the memory or the network between the two faulty?", peer=source)


def _topic(fingerprint: Fingerprint) -> str:
    # No word of the operation: those that differ are to meet.
    return f"call {fingerprint.call}"


_Rows = Sequence[tuple[Sequence[int], Sequence[int]]]
_Found = tuple[int, int] | None


def _other_than_most(rows: _Rows) -> _Found:
    """A rank with the result that most ranks hold, and one that holds another."""
    results = [taken[0] for _, taken in rows]
    usual = max(results, key=results.count)
    return next(((results.index(usual), rank) for rank, result in enumerate(results) if result != usual), None)


def _other_than_sent(what: Collective, rows: _Rows, root: int) -> _Found:
    """The sender and the receiver of what has changed on its way."""
    for rank, (_, taken) in enumerate(rows):
        for (source, part), received in zip(what.sources(rank, len(rows), root), taken, strict=True):
            if rows[source][0][part] != received:
                return source, rank
    return None
