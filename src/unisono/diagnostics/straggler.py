"""Search for the rank that the others wait for, against the noise of a scheduler.

Ranks that share cores arrive late by turns, and by more than a real straggler is late. So a rank is compared with the
others call by call, by order (Friedman, 1937), and amounts are medians.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from typing import Any

__all__ = ["find_straggler"]

_CALLS = 5
_DEVIATIONS = 4.5
_LATER_THAN = 0.75
_SHARE_OF_STEP, _STEADY_SHARE = 0.02, 0.1


def find_straggler(
    places: Mapping[str, Sequence[Mapping[int, float]]], core_waits: Mapping[int, float] | None = None
) -> dict[str, Any] | None:
    """Return the rank that is late at one place of the program more often than chance allows, if there is one.

    A place needs 5 calls. The rank must come after three of four of the others' arrivals, and 4.5 standard deviations
    more often than ranks in random order, or last at every call where this is out of reach; and its median lateness
    must be 2 % of the time from one call to the next.

    The order alone proves too little with few calls, or with two ranks, because there is no third one to compare with.
    Then the lateness must be 10 %, and steady: at least half of its median at four of five calls; and in all more than
    the rank itself waited for a core, because two ranks that share cores may keep their order.

    Args:
        places: Names, and for each call there when each rank arrived, in microseconds.
        core_waits: How long each rank waited for a core, in seconds, as far as it is known.

    Returns:
        The rank of most lateness in all: "rank", "where", "last" and "of" (calls), "late_s" (the median), and
        "waited_s" (the sum of the times for which all others waited); or None.

    Example:
        >>> steps = [{0: 1e4 * step, 1: 1e4 * step + 5e3} for step in range(20)]
        >>> find_straggler({"all_reduce": steps})
        {'rank': 1, 'where': 'all_reduce', 'last': 20, 'of': 20, 'late_s': 0.005, 'waited_s': 0.1}
    """
    found = []
    for where, calls in places.items():
        for rank in sorted({rank for call in calls for rank in call}):
            own = [call for call in calls if rank in call and len(call) > 1]
            if len(own) >= _CALLS and _is_late(rank, own, (core_waits or {}).get(rank, 0.0)):
                found.append((_lateness(rank, own) * len(own), rank, where, own))
    if not found:
        return None
    _, rank, where, own = max(found, key=lambda each: each[0])
    leads = [call[rank] - max(_others(rank, call)) for call in own]
    return {
        "rank": rank,
        "where": where,
        "last": sum(lead > 0 for lead in leads),
        "of": len(own),
        "late_s": round(_lateness(rank, own) / 1e6, 9),
        "waited_s": round(sum(lead for lead in leads if lead > 0) / 1e6, 9),
    }


def _is_late(rank: int, calls: Sequence[Mapping[int, float]], core_wait_s: float) -> bool:
    scores = [_score(rank, call) for call in calls]
    # The variance of a uniformly distributed place in the order, as a fraction of the others.
    deviation = sqrt(sum((len(call) + 1) / (12 * (len(call) - 1)) for call in calls))
    most = len(calls) / 2 / deviation
    if (sum(scores) - len(calls) / 2) / deviation < min(_DEVIATIONS, most) * (1 - 1e-9):
        return False
    if sum(scores) < _LATER_THAN * len(calls):
        return False
    late = sorted(_late(rank, call) for call in calls)
    starts = sorted(call[rank] for call in calls)
    share = median(late) / max((starts[-1] - starts[0]) / (len(calls) - 1), 1e-3)
    if most >= _DEVIATIONS and min(map(len, calls)) > 2:
        return share >= _SHARE_OF_STEP
    leads = (call[rank] - max(_others(rank, call)) for call in calls)
    if sum(lead for lead in leads if lead > 0) <= core_wait_s * 1e6:
        return False
    return share >= _STEADY_SHARE and late[(len(calls) - 1) // 5] >= median(late) / 2


def _score(rank: int, call: Mapping[int, float]) -> float:
    """Return the fraction of the other ranks that arrived before this one; a tie counts half."""
    others = _others(rank, call)
    return sum((call[rank] > other) + (call[rank] == other) / 2 for other in others) / len(others)


def _lateness(rank: int, calls: Sequence[Mapping[int, float]]) -> float:
    return median(_late(rank, call) for call in calls)


def _late(rank: int, call: Mapping[int, float]) -> float:
    return call[rank] - median(_others(rank, call))


def _others(rank: int, call: Mapping[int, float]) -> list[float]:
    return [arrival for other, arrival in call.items() if other != rank]
