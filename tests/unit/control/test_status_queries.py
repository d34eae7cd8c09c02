"""Queries to all ranks: complete answers, and those without an unresponsive rank."""

from __future__ import annotations

from unisono.control.state import ControlState

OK = "ok"


def world(size: int) -> ControlState:
    state = ControlState()
    for rank in range(size):
        state.handle(rank, 1, ("join", "world", rank, size))
    return state


def test_query_completes_when_all_have_answered() -> None:
    state = world(2)
    asked = state.handle(0, 7, ("survey", "world"))
    assert asked == [(0, (0, "asked", 1)), (1, (0, "asked", 1))]
    assert state.handle(1, 0, ("answer", 1, b"one")) == []
    answer = state.handle(0, 0, ("answer", 1, b"zero"))
    assert answer == [(0, (7, OK, [(("world", 0), b"zero"), (("world", 1), b"one")]))]
    assert state.handle(0, 0, ("answer", 1, b"late")) == []


def test_unresponsive_rank_does_not_block_a_query() -> None:
    state = world(3)
    state.handle(0, 7, ("survey", None))
    state.handle(0, 0, ("answer", 1, b"zero"))
    state.lost(2)
    out = state.handle(0, 8, ("enough", 7))
    assert out == [(0, (7, OK, [(("world", 0), b"zero"), (("world", 1), None)])), (0, (8, OK, None))]


def test_unauthenticated_clients_cannot_answer() -> None:
    state = world(1)
    state.handle(0, 7, ("survey", "world"))
    assert state.handle(5, 0, ("answer", 1, b"forged")) == []
