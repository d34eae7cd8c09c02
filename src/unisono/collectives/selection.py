"""Selection of a collective's algorithm: the requested one, the transport's own, or the cheapest by its cost."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from unisono.collectives.algorithms import ALGORITHMS, find, serving
from unisono.core.tensors import numels
from unisono.core.transport import Transport
from unisono.core.types import CollectiveCall, ReduceOp

__all__ = ["FEWEST_BYTES", "NATIVE", "choose", "known"]

NATIVE = "native"
FEWEST_BYTES = "fewest_bytes"

_GAP = 0.25
"""Part of a message's latency that passes before its sender can send the next message: the gap of LogP (Culler et al.,
1993). Without it, any number of messages to different ranks would cost as much as one message."""


def choose(
    transport: Transport,
    call: CollectiveCall,
    nbytes: int,
    requested: str | None = None,
    *,
    deterministic: bool = False,
) -> str:
    """Return the name of an algorithm of this collective, or "native".

    Args:
        transport: Transport that supplies native collectives and costs.
        call: The call as it will be passed to the transport.
        nbytes: Size of the whole message.
        requested: The caller's choice; `ValueError` lists the known names if it cannot serve the call. "fewest_bytes"
            is native, or the algorithm that sends least, regardless of its rounds.
        deterministic: Whether sums of rounded numbers must be reduced in the balanced tree over the ranks.
    """
    needs = _needs(call, transport.size, deterministic)
    native = transport.supports(call) and not needs.balanced
    if native and requested in (None, FEWEST_BYTES):
        return NATIVE
    if requested is None:
        return _cheapest(needs, nbytes, transport.latency_s, transport.second_per_byte)
    if requested == FEWEST_BYTES:
        return _cheapest(needs, transport.size, 0.0, 1.0)
    if (native and requested == NATIVE) or requested in _serving(needs, uneven=not _uniform(call)):
        return requested
    raise ValueError(
        f"{_refusal(transport, call, needs, requested)}; known: {', '.join(known(transport, call, needs))}"
    )


class _Needs(NamedTuple):
    """Requirements of a call that an algorithm must meet.

    Attributes:
        rounded: Whether results depend on the order of operations: sums and products of floating point.
        balanced: Whether that order must be the balanced tree over the ranks.
        rotated: Whether there is a root other than rank 0, so that the ranks of an algorithm are not those of the call.
    """

    collective: str
    size: int
    rounded: bool
    balanced: bool
    rotated: bool


def _needs(call: CollectiveCall, size: int, deterministic: bool) -> _Needs:
    tensors = call.inputs or call.outputs
    exact = not tensors or not (tensors[0].is_floating_point() or tensors[0].is_complex())
    rounded = call.op in (ReduceOp.SUM, ReduceOp.PRODUCT) and not exact
    return _Needs(call.name, size, rounded, deterministic and rounded, bool(call.root))


def known(transport: Transport, call: CollectiveCall, needs: _Needs | None = None) -> list[str]:
    """Every name that `choose` would accept."""
    needs = needs or _needs(call, transport.size, deterministic=False)
    native = transport.supports(call) and not needs.balanced
    return [NATIVE] * native + _serving(needs, uneven=not _uniform(call))


def _serving(needs: _Needs, *, uneven: bool = False) -> list[str]:
    names = serving(needs.collective, needs.size, rounded=needs.rounded, balanced=needs.balanced, uneven=uneven)
    if needs.balanced and needs.rotated:
        # In a single round the root reduces in the order of the call's own ranks.
        return [name for name in names if find(needs.collective, name).cost(needs.size, 1).rounds <= 1]
    return names


def _uniform(call: CollectiveCall) -> bool:
    """Return whether all parts are equally long, as far as this rank knows."""
    return len(set(call.lengths or numels((*call.inputs, *call.outputs)))) <= 1


def _refusal(transport: Transport, call: CollectiveCall, needs: _Needs, requested: str) -> str:
    """Return why an algorithm cannot serve a call."""
    if requested == NATIVE and not transport.supports(call):
        why = "for this operation and dtype" if call.name in transport.native else "at all"
        return f"this backend has no native {call.name} {why}"
    if requested != NATIVE and requested not in ALGORITHMS[call.name]:
        return f"unknown {call.name} algorithm {requested!r}"
    subject = f"the {call.name} algorithm {requested!r}"
    if needs.balanced:
        return f"{subject} does not keep the balanced tree of sums, which deterministic=True asks for"
    algorithm = find(call.name, requested)
    if needs.rounded and not algorithm.same_bits:
        return (
            f"{subject} reduces in another order on each rank, so that rounded sums would differ between ranks; it "
            "serves integers, booleans, min and max"
        )
    return algorithm.unsupported(needs.size) or f"{subject} needs parts of equal length"


@lru_cache(maxsize=4096)
def _cheapest(needs: _Needs, nbytes: int, latency_s: float, second_per_byte: float) -> str:
    def seconds(name: str) -> tuple[float, int]:
        cost = find(needs.collective, name).cost(needs.size, nbytes)
        latencies = cost.rounds + _GAP * max(0, cost.messages - cost.rounds)
        return latencies * latency_s + cost.sent * second_per_byte, cost.rounds

    # Whether the parts of all ranks are equally long, one rank alone cannot tell.
    return min(_serving(needs, uneven=True), key=seconds)
