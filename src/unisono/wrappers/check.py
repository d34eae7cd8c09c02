"""Compare what every rank is about to do, over the control plane, before any data moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

from unisono.control import Control
from unisono.errors import MismatchError
from unisono.transport import Fingerprint, Transport
from unisono.wrappers.wrapper import Wrapper

__all__ = ["Checked", "explain"]

_FIELDS = [field.name for field in fields(Fingerprint)]
# What ranks may do differently: where they call from, with what shape, and rows of an all_to_all.
_FREE = len(_FIELDS) - 4


class Checked(Wrapper):
    """Every collective starts with one exchange of fingerprints: `MismatchError` on all ranks if they differ.

    Cost: one round trip to the control plane a collective, none a message.
    """

    def __init__(self, inner: Transport, control: Control) -> None:
        super().__init__(inner)
        self._control = control
        self.native = inner.native
        self.checks = True

    def rewrap(self, inner: Transport) -> Checked:
        return Checked(inner, self._control)

    def begin(self, fingerprint: Fingerprint, timeout: float) -> None:
        mine = astuple(fingerprint)
        if fingerprint.sends or fingerprint.receives:
            values = self._control.exchange(self.group, f"call {fingerprint.call}", mine, timeout)
        else:
            same = self._control.agree(self.group, f"call {fingerprint.call}", mine[:_FREE], timeout)
            if same is None:
                return super().begin(fingerprint, timeout)
            values = self._control.exchange(self.group, f"call {fingerprint.call} in full", mine, timeout)
        prints = [Fingerprint(**dict(zip(_FIELDS, value, strict=True))) for value in values]
        problem = explain(prints)
        if problem:
            raise MismatchError(f"{problem}. Nothing was sent")
        return super().begin(fingerprint, timeout)


def explain(prints: Sequence[Fingerprint]) -> str:
    """What does not fit together, quoting every side; empty if all fits."""
    compared = [astuple(p)[:_FREE] for p in prints]
    if any(value != compared[0] for value in compared):
        differing = [name for i, name in enumerate(_FIELDS[:_FREE]) if len({str(value[i]) for value in compared}) > 1]
        sides: dict[str, list[int]] = {}
        for rank, fingerprint in enumerate(prints):
            sides.setdefault(_side(fingerprint), []).append(rank)
        quoted = "; ".join(f"{_ranks(ranks)}: {side}" for side, ranks in sides.items())
        return f"ranks differ in {', '.join(differing)}: {quoted}. All ranks make the same calls in the same order"
    for source, giver in enumerate(prints):
        for target, taker in enumerate(prints):
            given, taken = _at(giver.sends, target), _at(taker.receives, source)
            if given != taken:
                return (
                    f"rank {source} gives rank {target} {given} elements{_site(giver)}, "
                    f"which expects {taken}{_site(taker)}"
                )
    return ""


def _at(counts: tuple[int, ...], index: int) -> int | None:
    return counts[index] if index < len(counts) else None


def _side(p: Fingerprint) -> str:
    details: list[Any] = [p.op, p.dtype, p.device if p.device != "cpu" else None]
    details += [f"{' + '.join(map(str, p.counts[:4]))} elements" if p.counts else None]
    details += [f"shape {tuple(p.shape)}" if p.shape is not None else None]
    details += [f"root {p.root}" if p.root is not None else None, f"algorithm {p.algorithm}" if p.algorithm else None]
    return f"{p.operation}({', '.join(str(d) for d in details if d is not None)}){_site(p)}"


def _site(p: Fingerprint) -> str:
    return f" at {p.site}" if p.site else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
