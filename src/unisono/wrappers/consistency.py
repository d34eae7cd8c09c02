"""Comparison of the collectives of all ranks, over the control plane, before any data moves; and of the results."""

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
    """Starts every collective with an exchange of fingerprints: `MismatchError` on all ranks if they differ.

    Cost: one round trip to the control plane per collective, none per message. With `full`, which also compares shapes,
    one more after it, with hashes of the inputs and outputs: `CorruptedError` on all ranks if they differ. The hash of
    a sum cannot be known beforehand; ranks compare that they all hold the same one.

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

    def begin(self, fingerprint: Fingerprint, timeout_s: float) -> None:
        topic = _topic(fingerprint)
        if fingerprint.sends or fingerprint.receives:
            values = self._control.exchange(self.group, topic, fingerprint.values(), timeout_s)
        else:
            compared = fingerprint.compared(shapes=self.full)
            if self._control.agree(self.group, topic, compared, timeout_s) is None:
                return super().begin(fingerprint, timeout_s)
            values = self._control.exchange(self.group, f"{topic} in full", fingerprint.values(), timeout_s)
        problem = explain([Fingerprint(*value) for value in values], shapes=self.full)
        if problem:
            raise MismatchError(f"{problem}. Nothing was sent")
        return super().begin(fingerprint, timeout_s)

    def end(self, fingerprint: Fingerprint, call: CollectiveCall, timeout_s: float) -> None:
        super().end(fingerprint, call, timeout_s)
        collective = FAMILIES[call.name]
        # The hash of a sum cannot be known beforehand: it is compared where all ranks hold the sum.
        if not self.full or not collective.moves or (collective.reduces and not collective.same_everywhere):
            return
        given = [digest(tensor) for tensor in call.inputs]
        taken = [digest(tensor) for tensor in call.outputs]
        rows = self._control.exchange(self.group, f"{_topic(fingerprint)}, its results", (given, taken), timeout_s)
        found = _other_than_most(rows) if collective.reduces else _other_than_sent(collective, rows, call.root or 0)
        if found is not None:
            source, target = found
            who = f"rank {target} holds another result of {fingerprint.operation} than rank {source}"
            if call.name != "all_reduce":
                who = f"rank {target} received from rank {source} in {fingerprint.operation} other bytes than it sent"
            raise CorruptedError(f"{who}. Is the memory or the network between the two ranks faulty?", peer=source)


def _topic(fingerprint: Fingerprint) -> str:
    # The operation is not part of it, because differing calls must be compared.
    return f"call {fingerprint.call}"


_Rows = Sequence[tuple[Sequence[int], Sequence[int]]]
_Found = tuple[int, int] | None


def _other_than_most(rows: _Rows) -> _Found:
    """Return a rank with the most common result, and a rank with a different one."""
    results = [taken[0] for _, taken in rows]
    usual = max(results, key=results.count)
    return next(((results.index(usual), rank) for rank, result in enumerate(results) if result != usual), None)


def _other_than_sent(collective: Collective, rows: _Rows, root: int) -> _Found:
    """Return the sender and the receiver of data that changed in flight."""
    for rank, (_, taken) in enumerate(rows):
        for (source, part), received in zip(collective.sources(rank, len(rows), root), taken, strict=True):
            if rows[source][0][part] != received:
                return source, rank
    return None
