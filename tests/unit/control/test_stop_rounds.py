"""Requests to stop: the verdict, ranks that report no step, and jobs without ranks."""

from __future__ import annotations

from unisono.control.state import ControlState


def test_ranks_that_report_no_step_fail_the_group() -> None:
    state = ControlState()
    for rank in range(4):
        state.handle(rank, 1, ("join", "g", rank, 4))
    asked = state.handle(9, 1, ("stop", None, "spot"))
    assert asked == [*((rank, (0, "boundary", ("g", "spot"))) for rank in range(4)), (9, (1, "ok", 4))]
    assert state.handle(0, 2, ("passed", "g", 5)) == state.handle(0, 2, ("verdict", "g")) == []
    state.handle(1, 2, ("leave", "g"))
    failed = dict(state.handle(0, 3, ("unreported", "g", 2.0, ", which are busy")))
    text = (
        "waited 2.0 s for ranks 2, 3 to report the current step, so that all can stop at the same one, which are busy"
    )
    assert failed == {
        0: (3, "ok", None),
        **dict.fromkeys((2, 3), (0, "failed", ("g", "CommTimeoutError", 2, text))),
    }
    assert state.handle(0, 4, ("verdict", "g")) == [(0, (4, "failed", ("CommTimeoutError", 2, text)))]


def test_a_late_timeout_leaves_the_verdict() -> None:
    state = ControlState()
    for rank in range(2):
        state.handle(rank, 1, ("join", "g", rank, 2))
    state.handle(0, 2, ("stop", "g", ""))
    state.handle(0, 3, ("passed", "g", 5))
    state.handle(1, 3, ("passed", "g", 7))
    assert state.handle(0, 4, ("unreported", "g", 2.0)) == [(0, (4, "ok", None))]
    assert state.handle(0, 5, ("verdict", "g")) == [(0, (5, "ok", 8))]


def test_a_stop_of_a_group_that_has_ended_reaches_no_later_group_of_that_name() -> None:
    state = ControlState()
    assert state.handle(9, 1, ("stop", "g", "too early")) == [(9, (1, "ok", 0))]
    assert state.handle(0, 1, ("join", "g", 0, 1)) == [(0, (1, "ok", None))]


def test_a_stop_after_a_failure_is_a_new_one() -> None:
    state = ControlState()
    state.handle(0, 1, ("join", "g", 0, 1))
    state.handle(9, 1, ("stop", "g", "first"))
    state.handle(0, 2, ("fail", "g", "CommError", 0, "why"))
    assert state.handle(9, 2, ("stop", "g", "second"))[0] == (0, (0, "boundary", ("g", "second")))


def test_a_stop_of_no_ranks_is_known() -> None:
    state = ControlState()
    state.handle(0, 1, ("join", "g", 0, 1))
    state.handle(0, 2, ("leave", "g"))
    assert state.handle(9, 1, ("stop", None, "too late")) == [(9, (1, "ok", 0))]
