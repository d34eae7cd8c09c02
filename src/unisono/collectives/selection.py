"""Selection of a collective's algorithm: the requested one, the transport's own, or the cheapest by its cost."""

from __future__ import annotations

from functools import lru_cache

from unisono.collectives.algorithms import ALGORITHMS
from unisono.core.transport import Transport
from unisono.core.types import CollectiveCall

__all__ = ["FEWEST_BYTES", "NATIVE", "choose", "known"]

NATIVE = "native"
FEWEST_BYTES = "fewest_bytes"


def choose(transport: Transport, call: CollectiveCall, nbytes: int, requested: str | None = None) -> str:
    """Return the name of a schedule of this collective, or "native".

    Args:
        transport: Transport that supplies native collectives and costs.
        call: The call as it will be passed to the transport.
        nbytes: Size of the whole message.
        requested: The caller's choice; `ValueError` lists the known names if it is unknown. "fewest_bytes" is
            native, or the schedule that sends least, regardless of its rounds.
    """
    if requested == FEWEST_BYTES:
        return NATIVE if transport.supports(call) else _fewest_bytes(call.name, transport.size)
    if requested is None:
        if transport.supports(call):
            return NATIVE
        return _cheapest(call.name, transport.size, nbytes, transport.latency_s, transport.second_per_byte)
    if requested == NATIVE and not transport.supports(call):
        why = "for this operation and dtype" if call.name in transport.native else "at all"
        raise ValueError(f"this backend has no native {call.name} {why}; known: {', '.join(known(call, transport))}")
    if requested not in (NATIVE, FEWEST_BYTES) and requested not in ALGORITHMS[call.name]:
        raise ValueError(f"unknown {call.name} algorithm {requested!r}; known: {', '.join(known(call, transport))}")
    return requested


def known(call: CollectiveCall, transport: Transport) -> list[str]:
    """Every name that `choose` would accept."""
    return ([NATIVE] if transport.supports(call) else []) + ALGORITHMS[call.name].names()


@lru_cache(maxsize=4096)
def _cheapest(collective: str, size: int, nbytes: int, latency_s: float, second_per_byte: float) -> str:
    def seconds(name: str) -> float:
        cost = ALGORITHMS[collective][name].cost(size)
        return cost.rounds * latency_s + float(cost.sent) * nbytes * second_per_byte

    return min(ALGORITHMS[collective].names(), key=seconds)


@lru_cache(maxsize=4096)
def _fewest_bytes(collective: str, size: int) -> str:
    def least(name: str) -> tuple[float, int]:
        cost = ALGORITHMS[collective][name].cost(size)
        return float(cost.sent), cost.rounds

    return min(ALGORITHMS[collective].names(), key=least)
