"""Groups: contributions, leaving, and failures of all of them."""

from __future__ import annotations

from unisono.control.state import ControlState

OK = "ok"


def world(size: int) -> ControlState:
    state = ControlState()
    for rank in range(size):
        state.handle(rank, 1, ("join", "world", rank, size))
    return state


def test_contributions_before_leaving_count() -> None:
    state = ControlState()
    for rank in range(2):
        state.handle(rank, 1, ("join", "g", rank, 2))
    assert state.handle(0, 2, ("exchange", "g", "x", b"mine", False)) == []
    assert state.handle(0, 3, ("leave", "g")) == [(0, (3, "ok", None))]
    out = state.handle(1, 4, ("exchange", "g", "x", b"yours", False))
    assert sorted(out) == [(0, (2, "ok", [b"mine", b"yours"])), (1, (4, "ok", [b"mine", b"yours"]))]


def test_last_rank_learns_when_all_have_left() -> None:
    state = world(2)
    assert state.handle(0, 5, ("leave", "world", True)) == []
    assert state.handle(1, 6, ("leave", "world", True)) == [(0, (5, OK, None)), (1, (6, OK, None))]
    state = world(2)
    state.handle(0, 5, ("leave", "world", True))
    assert (0, (5, OK, None)) in state.lost(1)


def test_rank_that_has_left_waits_for_nobody_in_a_group_that_has_failed() -> None:
    state = world(3)
    assert state.handle(0, 5, ("leave", "world", True)) == []
    assert (0, (5, OK, None)) in state.handle(1, 6, ("fail", "world", "PeerLostError", 0, "rank 0 left"))
    assert state.handle(2, 7, ("leave", "world", True)) == [(2, (7, OK, None))]


def test_all_groups_can_be_failed() -> None:
    state = world(2)
    state.handle(1, 2, ("join", "world~1", 0, 1))
    out = state.handle(7, 1, ("fail_all", "AbortedError", "launch has ended"))
    assert [(client, reply[2]) for client, reply in out] == [
        (0, ("world", "AbortedError", None, "launch has ended")),
        (1, ("world", "AbortedError", None, "launch has ended")),
        (1, ("world~1", "AbortedError", None, "launch has ended")),
        (7, None),
    ]
