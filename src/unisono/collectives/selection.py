"""Selection of a collective's algorithm: the requested one, the transport's own, or the cheapest by its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from unisono.collectives.algorithms import ALGORITHMS, find
from unisono.collectives.tuning.cost_table import GAP, CostTable
from unisono.collectives.tuning.prediction import Choice, Machine, compare, predicted, size_class
from unisono.core.tensors import numels
from unisono.core.transport import Transport
from unisono.core.types import CollectiveCall, ReduceOp

__all__ = ["AUTO", "FEWEST_BYTES", "NATIVE", "Needs", "choose", "explain", "known", "needs_of"]

AUTO = "auto"
NATIVE = "native"
FEWEST_BYTES = "fewest_bytes"


def choose(
    transport: Transport,
    call: CollectiveCall,
    nbytes: int,
    requested: str | None = None,
    *,
    deterministic: bool = False,
    machine: Callable[[], Machine] | None = None,
) -> str:
    """Return the name of an algorithm of this collective, with its options, or "native".

    Args:
        transport: Transport that supplies native collectives and costs.
        call: The call as it will be passed to the transport.
        nbytes: Size of the whole message.
        requested: The caller's choice; `ValueError` lists the known names if it cannot serve the call. "fewest_bytes"
            is native, or the algorithm that sends least, regardless of its rounds. "auto" is the algorithm with the
            least predicted time, which is fixed by operation, size class, number of ranks, hosts and table of costs.
        deterministic: Whether sums of rounded numbers must be reduced in the balanced tree over the ranks.
        machine: Returns what "auto" depends on beside the call; the transport's built-in constants if None.
    """
    needs = needs_of(call, transport.size, deterministic)
    if requested == AUTO:
        here = machine() if machine else Machine(_builtin(transport), transport.size)
        requested = dict(here.table.overrides).get(call.name)
        if requested is None:
            return explain(needs, size_class(nbytes), here).algorithm
    native = transport.supports(call) and not needs.balanced
    if native and requested in (None, FEWEST_BYTES):
        return NATIVE
    if requested is None:
        return _cheapest(needs, nbytes, transport.latency_s, transport.second_per_byte)
    if requested == FEWEST_BYTES:
        return _cheapest(needs, transport.size, 0.0, 1.0)
    if (native and requested == NATIVE) or _serves(requested, needs, call):
        return requested
    raise ValueError(
        f"{_refusal(transport, call, needs, requested)}; known: {', '.join(known(transport, call, needs))}"
    )


def explain(needs: Needs, nbytes: int, machine: Machine, forced: str | None = None, why: str = "") -> Choice:
    """Return the algorithm that "auto" stands for, with the predicted times of the others.

    Args:
        needs: Requirements of the call.
        nbytes: A size class.
        machine: Constants and hosts.
        forced: Another algorithm to choose, for a reason `why`.
    """
    fastest = _fastest(needs, nbytes, machine)
    if forced is None or forced == fastest.algorithm:
        return replace(fastest, why=why or fastest.why)
    algorithm = find(needs.collective, forced)
    others = {**fastest.others, fastest.algorithm: fastest.predicted_s}
    if (seconds := others.pop(algorithm.label, None)) is None:
        seconds = predicted(algorithm, needs.size, nbytes, machine)
    return replace(
        fastest,
        algorithm=algorithm.label,
        options=dict(algorithm.options),
        predicted_s=seconds,
        others=others,
        excluded={name: bound for name, bound in fastest.excluded.items() if name != algorithm.label},
        why=why,
    )


@lru_cache(maxsize=4096)
def _fastest(needs: Needs, nbytes: int, machine: Machine) -> Choice:
    # Whether the parts of all ranks are equally long, one rank alone cannot tell.
    return compare(needs.collective, _serving(needs, uneven=True), needs.size, nbytes, machine)


def _builtin(transport: Transport) -> CostTable:
    return CostTable.builtin(transport.latency_s, transport.second_per_byte)


class Needs(NamedTuple):
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


def needs_of(call: CollectiveCall, size: int, deterministic: bool) -> Needs:
    """Return the requirements of a call."""
    tensors = call.inputs or call.outputs
    exact = not tensors or not (tensors[0].is_floating_point() or tensors[0].is_complex())
    rounded = call.op in (ReduceOp.SUM, ReduceOp.PRODUCT) and not exact
    return Needs(call.name, size, rounded, deterministic and rounded, bool(call.root))


def known(transport: Transport, call: CollectiveCall, needs: Needs | None = None) -> list[str]:
    """Every name that `choose` would accept."""
    needs = needs or needs_of(call, transport.size, deterministic=False)
    native = transport.supports(call) and not needs.balanced
    return [NATIVE] * native + _serving(needs, uneven=not _uniform(call))


def _serving(needs: Needs, *, uneven: bool = False) -> list[str]:
    return [name for name in ALGORITHMS[needs.collective].names() if _meets(name, needs, uneven)]


def _serves(requested: str, needs: Needs, call: CollectiveCall) -> bool:
    """Return whether an algorithm, with its options, serves a call; raise ValueError for options that do not exist."""
    known = requested.partition(":")[0] in ALGORITHMS[needs.collective]
    return known and _meets(requested, needs, not _uniform(call))


def _meets(name: str, needs: Needs, uneven: bool) -> bool:
    algorithm = find(needs.collective, name)
    served = algorithm.serves(needs.size, rounded=needs.rounded, balanced=needs.balanced, uneven=uneven)
    # In a single round the root reduces in the order of the call's own ranks.
    return served and not (needs.balanced and needs.rotated and algorithm.cost(needs.size, 1).rounds > 1)


def _uniform(call: CollectiveCall) -> bool:
    """Return whether all parts are equally long, as far as this rank knows."""
    return len(set(call.lengths or numels((*call.inputs, *call.outputs)))) <= 1


def _refusal(transport: Transport, call: CollectiveCall, needs: Needs, requested: str) -> str:
    """Return why an algorithm cannot serve a call."""
    if requested == NATIVE and not transport.supports(call):
        why = "for this operation and dtype" if call.name in transport.native else "at all"
        return f"this backend has no native {call.name} {why}"
    if requested != NATIVE and requested.partition(":")[0] not in ALGORITHMS[call.name]:
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
def _cheapest(needs: Needs, nbytes: int, latency_s: float, second_per_byte: float) -> str:
    def seconds(name: str) -> tuple[float, int]:
        cost = find(needs.collective, name).cost(needs.size, nbytes)
        latencies = cost.rounds + GAP * max(0, cost.messages - cost.rounds)
        return latencies * latency_s + cost.sent * second_per_byte, cost.rounds

    # Whether the parts of all ranks are equally long, one rank alone cannot tell.
    return min(_serving(needs, uneven=True), key=seconds)
