"""Selection of a collective's algorithm: the requested one, the transport's own, or the cheapest by its cost."""

from __future__ import annotations

from functools import lru_cache

from unisono.collectives.algorithms import ALGORITHMS, Algorithm, find, serving
from unisono.core.tensors import numels
from unisono.core.transport import Transport
from unisono.core.types import CollectiveCall, ReduceOp

__all__ = ["FEWEST_BYTES", "NATIVE", "choose", "known"]

NATIVE = "native"
FEWEST_BYTES = "fewest_bytes"

_GAP = 0.25
"""Part of a message's latency that passes before its sender can send the next message: the gap of LogP (Culler et al.,
1993). Without it, any number of messages to different ranks would cost as much as one message."""


def choose(transport: Transport, call: CollectiveCall, nbytes: int, requested: str | None = None) -> str:
    """Return the name of an algorithm of this collective, or "native".

    Args:
        transport: Transport that supplies native collectives and costs.
        call: The call as it will be passed to the transport.
        nbytes: Size of the whole message.
        requested: The caller's choice; `ValueError` lists the known names if it is unknown. "fewest_bytes" is
            native, or the algorithm that sends least, regardless of its rounds.
    """
    if requested in (None, FEWEST_BYTES) and transport.supports(call):
        return NATIVE
    if requested == FEWEST_BYTES:
        return _fewest_bytes(call.name, transport.size, _rounds(call))
    if requested is None:
        cost_s = transport.latency_s, transport.second_per_byte
        return _cheapest(call.name, transport.size, nbytes, _rounds(call), *cost_s)
    if requested == NATIVE:
        if transport.supports(call):
            return NATIVE
        why = "for this operation and dtype" if call.name in transport.native else "at all"
        raise ValueError(f"this backend has no native {call.name} {why}; known: {', '.join(known(call, transport))}")
    if requested not in ALGORITHMS[call.name]:
        raise ValueError(f"unknown {call.name} algorithm {requested!r}; known: {', '.join(known(call, transport))}")
    algorithm = find(call.name, requested)
    if reason := _refusal(algorithm, transport.size, _rounds(call)):
        raise ValueError(f"{reason}; known here: {', '.join(known(call, transport))}")
    if algorithm.uniform and not _uniform(call):
        raise ValueError(f"the {call.name} algorithm {requested!r} needs parts of equal length")
    return requested


def known(call: CollectiveCall, transport: Transport) -> list[str]:
    """Every name that `choose` would accept."""
    native = [NATIVE] if transport.supports(call) else []
    return native + serving(call.name, transport.size, rounded=_rounds(call), uneven=not _uniform(call))


def _rounds(call: CollectiveCall) -> bool:
    """Return whether results depend on the order of the operations: sums and products of floating point."""
    tensors = call.inputs or call.outputs
    exact = not tensors or not (tensors[0].is_floating_point() or tensors[0].is_complex())
    return call.op in (ReduceOp.SUM, ReduceOp.PRODUCT) and not exact


def _uniform(call: CollectiveCall) -> bool:
    """Return whether all parts of this rank are equally long."""
    return len(set(numels((*call.inputs, *call.outputs)))) <= 1


def _refusal(algorithm: Algorithm, size: int, rounds: bool) -> str:
    if rounds and not algorithm.same_bits:
        return (
            f"the {algorithm.collective} algorithm {algorithm.name!r} reduces in another order on each rank, so that "
            "rounded sums would differ between ranks; it serves integers, booleans, min and max"
        )
    return algorithm.unsupported(size)


@lru_cache(maxsize=4096)
def _cheapest(collective: str, size: int, nbytes: int, rounds: bool, latency_s: float, second_per_byte: float) -> str:
    def seconds(name: str) -> float:
        cost = find(collective, name).cost(size, nbytes)
        latencies = cost.rounds + _GAP * max(0, cost.messages - cost.rounds)
        return latencies * latency_s + cost.sent * second_per_byte

    # Whether the parts of all ranks are equally long, one rank alone cannot tell.
    return min(serving(collective, size, rounded=rounds), key=seconds)


@lru_cache(maxsize=4096)
def _fewest_bytes(collective: str, size: int, rounds: bool) -> str:
    def least(name: str) -> tuple[int, int]:
        cost = find(collective, name).cost(size, size)
        return cost.sent, cost.rounds

    return min(serving(collective, size, rounded=rounds), key=least)
