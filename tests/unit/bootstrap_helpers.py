"""Ranks that meet, each of them a thread."""

from __future__ import annotations

from waiting import run_concurrently

from unisono.bootstrap import Rendezvous, find

__all__ = ["SOON", "meet"]

SOON = 20.0


def meet(method: str, size: int, timeout_s: float = SOON) -> list[Rendezvous]:
    """All ranks' places, each rank a thread."""
    places = run_concurrently(*[lambda rank=rank: find(method, rank, size, timeout_s) for rank in range(size)])
    for place in places:
        if isinstance(place, Exception):
            raise place
    return places
