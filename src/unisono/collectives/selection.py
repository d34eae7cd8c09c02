"""Selection of a collective's algorithm: the requested one, the transport's native one, or the cheapest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from unisono.collectives.algorithms import ALGORITHMS, find
from unisono.collectives.executor import Schedule, ScratchPool
from unisono.collectives.tuning.cost_table import GAP
from unisono.collectives.tuning.prediction import Choice, Machine, compare, size_class
from unisono.core.call import NATIVE, Call, Steps
from unisono.core.collective import FAMILIES
from unisono.core.tensors import numels
from unisono.core.transport import Transport
from unisono.core.types import ReduceOp

__all__ = ["AUTO", "FEWEST_BYTES", "Needs", "Selection", "cheapest", "explain", "message_bytes", "serves"]

AUTO = "auto"
FEWEST_BYTES = "fewest_bytes"

_Chosen = tuple[str, Steps | None]


class Selection:
    """Chooses an algorithm for each call on a transport. Caches the choice for later calls of the same kind.

    Args:
        transport: Transport whose native collectives and message costs are considered.
        segment_bytes: Maximum size of an algorithm's messages.
        deterministic: Whether floating-point sums and products must be reduced in the balanced tree over the ranks.
        machine: Function that returns the cost constants and ranks per host for "auto"; None if no call uses "auto".
    """

    def __init__(
        self,
        transport: Transport,
        segment_bytes: int,
        *,
        deterministic: bool = False,
        machine: Callable[[], Machine] | None = None,
    ) -> None:
        self._transport = transport
        self._segment_bytes = segment_bytes
        self._machine = machine
        self._size = transport.size
        self._deterministic = deterministic
        self._scratch = ScratchPool()
        self._kept: dict[tuple[Any, ...], _Chosen] = {}
        self._schedules: dict[tuple[Any, ...], Schedule] = {}

    def choose(self, call: Call, requested: str | None = None) -> _Chosen:
        """Return the name (with options) and the steps of the chosen algorithm, or "native" and None.

        Args:
            call: The call, whose `steps` are not set yet.
            requested: The algorithm that the caller requested, if any. If the requested algorithm cannot serve the
                call, a ValueError lists those that can. "fewest_bytes" means the native collective if there is one, or
                else the algorithm that sends the fewest bytes, regardless of its rounds. "auto" means the algorithm
                with the lowest predicted time, which depends on the operation, size class, number of ranks, hosts and
                cost table.
        """
        native = bool(self._transport.native) and self._transport.supports(call)
        if native and requested is None and not self._deterministic:
            return NATIVE, None
        tensors = call.inputs or call.outputs
        dtype = tensors[0].dtype if tensors else None
        # Round the size up to a power of two, so that calls of similar size share one choice.
        bits = max(0, message_bytes(call, self._size) - 1).bit_length()
        machine = self._machine() if requested == AUTO and self._machine is not None else None
        uniform = requested is None or _is_uniform(call)
        key = call.name, call.op, dtype, bits, requested, native, call.root, machine, uniform
        chosen = self._kept.get(key)
        if chosen is None:
            balanced = self._deterministic or (requested is None and self._transport.balanced)
            needs = self._needs(call.name, call.op, dtype, balanced=balanced, rotated=bool(call.root))
            label = self._choose(call, needs, 1 << bits, native, requested, machine)
            chosen = self._kept[key] = label, None if label == NATIVE else self._schedule(call, label)
        return chosen

    def plan(
        self, collective: str, nbytes: int, dtype: torch.dtype, op: ReduceOp | None, algorithm: str | None
    ) -> Choice:
        """Return the algorithm that "auto" chooses for a call, and the predicted times of all possible algorithms.

        Args:
            collective, nbytes, dtype, algorithm: See `Communicator.plan`.
            op: Reduce operation; None if nothing is reduced.
        """
        assert self._machine is not None
        machine = self._machine()
        needs = self._needs(collective, op, dtype, balanced=self._deterministic, rotated=False)
        why = "set by the argument"
        if algorithm is None:
            algorithm = dict(machine.table.overrides).get(collective)
            why = "" if algorithm is None else "set by UNISONO_ALGORITHM or the overrides of the table"
        return explain(needs, size_class(nbytes), machine, algorithm, why)

    def _schedule(self, call: Call, label: str) -> Steps:
        key = call.name, label, call.root
        if key not in self._schedules:
            algorithm = find(call.name, label)
            transport = self._transport
            self._schedules[key] = Schedule(
                algorithm, transport.rank, transport.size, call.root or 0, self._segment_bytes, self._scratch
            )
        return self._schedules[key]

    def _needs(
        self, collective: str, op: ReduceOp | None, dtype: torch.dtype | None, *, balanced: bool, rotated: bool
    ) -> Needs:
        inexact = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
        rounded = inexact and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
        return Needs(collective, self._size, rounded, rounded and balanced, rotated)

    def _choose(
        self, call: Call, needs: Needs, nbytes: int, native: bool, requested: str | None, machine: Machine | None
    ) -> str:
        if machine is not None:
            requested = dict(machine.table.overrides).get(call.name)
            if requested is None:
                return explain(needs, nbytes, machine).algorithm
        native = native and not needs.balanced
        if native and requested in (None, FEWEST_BYTES, NATIVE):
            return NATIVE
        if requested is None:
            return cheapest(needs, nbytes, self._transport.latency_s, self._transport.second_per_byte)
        if requested == FEWEST_BYTES:
            return cheapest(needs, self._size, 0.0, 1.0)
        if requested.partition(":")[0] in ALGORITHMS[call.name] and serves(
            requested, needs, uneven=not _is_uniform(call)
        ):
            return requested
        names = [NATIVE] * native + _serving(needs, uneven=not _is_uniform(call))
        refusal = _refusal(self._transport, call, needs, requested)
        raise ValueError(f"{refusal}; known: {', '.join(names)}")


def explain(needs: Needs, nbytes: int, machine: Machine, forced: str | None = None, why: str = "") -> Choice:
    """Return the algorithm that "auto" chooses, and the predicted times of the other algorithms.

    Args:
        needs: Requirements of the call.
        nbytes: A size class.
        machine: Cost constants and ranks per host.
        forced: Algorithm to choose instead of the fastest, for the reason in `why`.
    """
    found = _compared(needs, nbytes, machine, forced, why)
    # The caller may change these dicts, but not those of the cached choice.
    return replace(found, options=dict(found.options), others=dict(found.others))


@lru_cache(maxsize=4096)
def _compared(needs: Needs, nbytes: int, machine: Machine, forced: str | None, why: str) -> Choice:
    # Assume uneven parts, because a rank cannot tell whether other ranks' parts have the same length.
    names = _serving(needs, uneven=True)
    return compare(needs.collective, names, needs.size, nbytes, machine, forced=forced, why=why)


class Needs(NamedTuple):
    """Requirements of a call that an algorithm must meet.

    Attributes:
        rounded: Whether results depend on the order of operations, as for sums and products of floating-point numbers.
        balanced: Whether results must be reduced in the balanced tree over the ranks.
        rotated: Whether the root is not rank 0, so that an algorithm's rank numbers, which start at the root, differ
            from the call's.
    """

    collective: str
    size: int
    rounded: bool
    balanced: bool
    rotated: bool


def message_bytes(call: Call, size: int) -> int:
    """Return the whole message's size in bytes; equal on all ranks unless lengths differ between pairs of ranks."""
    family = FAMILIES[call.name]
    if call.lengths:
        return sum(call.lengths) * (call.inputs or call.outputs)[0].itemsize
    if family.root is not None and not family.in_place:
        return size * (call.outputs if family.scatters else call.inputs)[0].nbytes
    many = call.inputs if family.scatters or not family.gathers else call.outputs
    total = 0
    for tensor in many or call.outputs:
        total += tensor.nbytes
    return total


def _serving(needs: Needs, *, uneven: bool = False) -> list[str]:
    return [name for name in ALGORITHMS[needs.collective].names() if serves(name, needs, uneven=uneven)]


def serves(name: str, needs: Needs, *, uneven: bool) -> bool:
    """Return whether an algorithm can serve a call. `uneven` means that the ranks' parts may differ in length."""
    algorithm = find(needs.collective, name)
    served = algorithm.serves(needs.size, rounded=needs.rounded, balanced=needs.balanced, uneven=uneven)
    # Rotated rank numbers do no harm if the algorithm has a single round, because the root then reduces all
    # contributions itself, in the order of the call's ranks.
    return served and not (needs.balanced and needs.rotated and algorithm.cost(needs.size, 1).rounds > 1)


def _is_uniform(call: Call) -> bool:
    """Return whether all parts have the same length, as far as this rank knows."""
    return len(set(call.lengths or numels((*call.inputs, *call.outputs)))) <= 1


def _refusal(transport: Transport, call: Call, needs: Needs, requested: str) -> str:
    """Return the reason why an algorithm cannot serve a call."""
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
def cheapest(needs: Needs, nbytes: int, latency_s: float, second_per_byte: float) -> str:
    """Return the algorithm with the lowest declared cost.

    Args:
        needs: Requirements of the call.
        nbytes: Size of the whole message in bytes.
        latency_s, second_per_byte: Latency of a message in seconds, and seconds per byte.
    """

    def seconds(name: str) -> tuple[float, int]:
        cost = find(needs.collective, name).cost(needs.size, nbytes)
        latencies = cost.rounds + GAP * max(0, cost.messages - cost.rounds)
        return latencies * latency_s + cost.sent * second_per_byte, cost.rounds

    # Assume uneven parts, because a rank cannot tell whether other ranks' parts have the same length.
    return min(_serving(needs, uneven=True), key=seconds)
