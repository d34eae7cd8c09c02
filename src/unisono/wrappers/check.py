"""Compare what every rank is about to do, over the control plane, before any data moves; and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.control import Control
from unisono.errors import CorruptedError, MismatchError
from unisono.fingerprint import Fingerprint, explain
from unisono.guarded import digest
from unisono.transport import Transport
from unisono.types import Call
from unisono.wrappers.wrapper import Wrapper

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

    def __init__(self, inner: Transport, control: Control, *, full: bool = False) -> None:
        super().__init__(inner)
        self._control, self.full = control, full
        self.native = inner.native
        self.checks = True

    def rewrap(self, inner: Transport) -> Checked:
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

    def end(self, fingerprint: Fingerprint, call: Call, timeout: float) -> None:
        super().end(fingerprint, call, timeout)
        if not self.full or call.name not in _COMPARED:
            return
        given = [digest(tensor) for tensor in call.inputs]
        taken = [digest(tensor) for tensor in call.outputs]
        rows = self._control.exchange(self.group, f"{_topic(fingerprint)}, its results", (given, taken), timeout)
        found = _COMPARED[call.name]([row[0] for row in rows], [row[1] for row in rows], call.root or 0)
        if found is not None:
            source, target = found
            who = f"rank {target} holds another result of {fingerprint.operation} than rank {source}"
            if call.name != "all_reduce":
                who = f"rank {target} received from rank {source} in {fingerprint.operation} other bytes than it sent"
            raise CorruptedError(f"{who}. Is the memory or the network between the two faulty?", peer=source)


def _topic(fingerprint: Fingerprint) -> str:
    # No word of the operation: those that differ are to meet.
    return f"call {fingerprint.call}"


_Rows = Sequence[Sequence[int]]
_Found = tuple[int, int] | None


def _same(given: _Rows, taken: _Rows, root: int) -> _Found:
    """All ranks hold the same; who differs from most is named."""
    results = [row[0] for row in taken]
    usual = max(results, key=results.count)
    return next(((results.index(usual), rank) for rank, result in enumerate(results) if result != usual), None)


def _from_root(given: _Rows, taken: _Rows, root: int) -> _Found:
    return next(((root, rank) for rank, row in enumerate(taken) if row[0] != given[root][0]), None)


def _scattered(given: _Rows, taken: _Rows, root: int) -> _Found:
    return next(((root, rank) for rank, row in enumerate(taken) if row[0] != given[root][rank]), None)


def _gathered(given: _Rows, taken: _Rows, root: int) -> _Found:
    """Every list that somebody holds is of what the ranks gave."""
    lists = ((rank, row) for rank, row in enumerate(taken) if row)
    return next(((r, rank) for rank, row in lists for r, part in enumerate(row) if part != given[r][0]), None)


def _exchanged(given: _Rows, taken: _Rows, root: int) -> _Found:
    return next(
        ((r, rank) for rank, row in enumerate(taken) for r, part in enumerate(row) if part != given[r][rank]), None
    )


_COMPARED: dict[str, Callable[[_Rows, _Rows, int], _Found]] = {
    "all_reduce": _same,
    "broadcast": _from_root,
    "scatter": _scattered,
    "gather": _gathered,
    "all_gather": _gathered,
    "all_to_all": _exchanged,
}
