"""Saved states of an epoch, which record the progress of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.data.resharding import ShardingPhase

__all__ = ["FORMAT", "check_states", "counts_of", "gather_states", "phases_of"]

FORMAT = 1

_ALIKE = ("epoch", "seed", "samples", "partition", "shuffle", "phases", "parts", "settings")


def check_states(states: Sequence[dict[str, Any]], expected: dict[str, Any]) -> dict[str, Any]:
    """Return the values common to all states. Raises `ValueError` if states contradict each other or `expected`.

    Args:
        states: States of ranks of one job, all saved at the same time.
        expected: Values of this sampler that the states must also have, by key.
    """
    for state in states:
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            known = state.get("format") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"the state has format {known!r}, but this sampler reads format {FORMAT}")
    first = states[0]
    for key in _ALIKE:
        values = [state[key] for state in states]
        if any(value != values[0] for value in values):
            raise ValueError(f"the states must come from one job at one time: they have {key} {values}")
    if len({state["rank"] for state in states}) < len({(state["rank"], state["taken"]) for state in states}):
        raise ValueError("the states must come from one job at one time: two of the same rank differ")
    for key, value in expected.items():
        if first[key] != value:
            raise ValueError(f"the state is of another sampler: it has {key}={first[key]!r}, and this one {value!r}")
    return first


def gather_states(comm: Any, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of all ranks of `comm`, or only this rank's state if `comm` cannot exchange objects."""
    exchange = getattr(comm, "all_gather_object", None)
    return [state] if exchange is None else list(exchange(state))


def phases_of(state: dict[str, Any]) -> list[ShardingPhase]:
    """Return the phases that a state records."""
    return [ShardingPhase(phase["parts"], tuple(phase["taken"]), phase["settings"]) for phase in state["phases"]]


def counts_of(states: Sequence[dict[str, Any]], lengths: Sequence[int], in_step: bool, lost: bool = False) -> list[int]:
    """Return the number of samples that each rank of the job had committed.

    A rank without a state is assumed to have advanced as far as the other ranks.

    Args:
        states: States of some or all ranks of the job.
        lengths: Number of samples of each rank.
        in_step: Whether ranks can be assumed to progress at the same pace.
        lost: Whether ranks without a state have died. Dead ranks are assumed to have advanced as far as the furthest
            rank that has a state.

    Raises:
        ValueError: The counts of ranks without a state cannot be inferred, so all states are needed; or a count is
            out of range.
    """
    counts = {state["rank"]: int(state["taken"]) for state in states}
    missing = [rank for rank in range(len(lengths)) if rank not in counts]
    for rank, taken in counts.items():
        if not 0 <= taken <= lengths[rank]:
            raise ValueError(f"the state records {taken} samples used by rank {rank}, which had {lengths[rank]}")
    if missing and any(counts.values()) and not in_step and not lost:
        raise ValueError(
            f"ranks with unequal parts take samples at their own pace: load the states of all {len(lengths)} ranks, "
            "as a list"
        )
    leader = max(counts, key=lambda rank: (counts[rank], lengths[rank]))
    furthest = counts[leader]
    longer = [rank for rank in missing if lengths[rank] > furthest]
    if not longer or lost or furthest < lengths[leader]:
        return [counts.get(rank, min(furthest, length)) for rank, length in enumerate(lengths)]
    # Rank `leader` has used all its samples, but a rank without a state has more samples, and may have used one more.
    through = next(state["through"] for state in states if state["rank"] == leader)
    if through is None or max(lengths) > furthest + 1:
        raise ValueError(
            f"rank {leader} had used all of its {furthest} samples, but its state does not record whether rank "
            f"{longer[0]} "
            f"had used more of its {lengths[longer[0]]}: load the states of all {len(lengths)} ranks, as a list"
        )
    return [counts.get(rank, length if through else min(furthest, length)) for rank, length in enumerate(lengths)]
