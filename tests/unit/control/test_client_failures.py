"""Missing, dead, leaving and conflicting ranks: the control plane reports them to all, over sockets and in threads."""

from __future__ import annotations

import threading

import pytest
from control_helpers import SOON, Make, Told, everywhere, world
from insides import cut
from waiting import run_concurrently

import unisono as un
from unisono.core.failure import Cause, error_of
from unisono.core.group import Group
from unisono.errors import ClosedError, CommError, CommTimeoutError, MismatchError, PeerLostError


def test_timeout_names_missing_ranks_to_all(make: Make) -> None:
    controls, groups, told = world(make, 4)
    waiting = [
        lambda: controls[0].exchange(groups[0], "all_reduce #3", 1, 0.2),
        lambda: controls[2].exchange(groups[2], "all_reduce #3", 1, SOON),
        lambda: controls[1].first_cause(groups[1], SOON),
    ]
    first, second, cause = run_concurrently(*waiting)
    words = (
        "waited 0.2 s in all_reduce #3 for rank 1 (and 3), which have not arrived. "
        "Are they alive, or did they skip a call?"
    )
    assert cause == Cause("CommTimeoutError", 1, words)
    assert (type(first), str(first)) == (CommTimeoutError, f"rank 0 of 4: timed out: {words}")
    assert (type(second), str(second)) == (CommTimeoutError, f"rank 2 of 4: timed out: {words}")
    late = run_concurrently(lambda: controls[3].exchange(groups[3], "all_reduce #3", 1, SOON))[0]
    assert isinstance(late, CommTimeoutError)
    assert everywhere(controls, groups, lambda c, g: c.first_cause(g, SOON)) == [cause] * 4
    assert [heard.only() for heard in told] == [cause] * 4


def test_death_is_reported_to_waiting_and_other_ranks(make: Make) -> None:
    controls, groups, told = world(make, 3)
    waiting = run_concurrently(lambda: controls[0].exchange(groups[0], "x", 1, SOON), lambda: cut(controls[1]))[0]
    assert isinstance(waiting, PeerLostError)
    assert str(waiting) == "rank 0 of 3: rank 1 was lost: its process ended without closing the communicator"
    assert (waiting.peer, waiting.rank) == (1, 0)
    cause = controls[2].first_cause(groups[2], SOON)
    assert cause is not None
    assert (cause.kind, cause.rank) == ("PeerLostError", 1)
    assert told[2].only() == cause


def test_first_cause_is_kept(make: Make) -> None:
    controls, groups, told = world(make, 2)
    first = Cause("MismatchError", 1, "rank 1 differs")
    assert controls[0].first_cause(groups[0]) is None
    assert controls[1].report_failure(groups[1], first) == first
    assert controls[0].first_cause(groups[0], SOON) == first
    assert controls[0].report_failure(groups[0], Cause("AbortedError", 0, "later")) == first
    cut(controls[1])
    with pytest.raises(MismatchError, match="rank 0 of 2: rank 1 differs"):
        controls[0].exchange_unless_equal(groups[0], "x", 1, SOON)
    assert told[0].only() == first


def test_late_joiner_learns_the_failure(make: Make) -> None:
    early, late, heard = make(), make(), Told()
    early.join(Group.world(0, 2))
    cause = early.report_failure(Group.world(0, 2), Cause("AbortedError", 0, "enough"))
    late.join(Group.world(1, 2), heard)
    assert late.first_cause(Group.world(1, 2), SOON) == cause
    assert heard.only() == cause
    assert make().first_cause(Group.world(0, 2)) == cause


def test_clean_leave(make: Make) -> None:
    controls, groups, told = world(make, 3)
    left, waiting = run_concurrently(
        lambda: controls[1].leave(groups[1]), lambda: controls[0].exchange_unless_equal(groups[0], "x", 1, SOON)
    )
    assert left is None
    assert isinstance(waiting, PeerLostError)
    assert "rank 1 has left (it closed the communicator, or its program has ended)" in str(waiting)
    with pytest.raises(PeerLostError, match="rank 1 has left"):
        controls[2].exchange(groups[2], "y", 1, SOON)
    assert all(heard.nothing() for heard in told)
    controls[1].leave(groups[1])


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [(0, 2, "two processes claim to be rank 0"), (1, 3, "declares 3 ranks for world, other ranks 2")],
)
def test_conflicting_join_fails_a_forming_group(make: Make, rank: int, size: int, words: str) -> None:
    first, second = make(), make()
    first.join(Group.world(0, 2))
    with pytest.raises(MismatchError, match=words):
        second.join(Group.world(rank, size))
    with pytest.raises(MismatchError, match=words):
        first.exchange(Group.world(0, 2), "x", 1, SOON)


def test_conflicting_join_does_not_affect_a_complete_group(make: Make) -> None:
    controls, groups, told = world(make, 2)
    with pytest.raises(MismatchError, match="two processes claim to be rank 1"):
        make().join(Group.world(1, 2))
    assert everywhere(controls, groups, lambda c, g: c.exchange_unless_equal(g, "x", 1, SOON)) == [None, None]
    assert all(heard.nothing() for heard in told)


def test_after_close(make: Make) -> None:
    controls, groups, _ = world(make, 2)
    controls[0].close()
    controls[0].close()
    controls[0].leave(groups[0])
    with pytest.raises(ClosedError, match="closed"):
        controls[0].get("x", SOON)
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        controls[1].exchange_unless_equal(groups[1], "x", 1, SOON)


def test_close_ends_a_wait(make: Make) -> None:
    control = make()
    started = threading.Event()

    def wait() -> bytes:
        started.set()
        return control.get("never", SOON)

    def close() -> None:
        started.wait(SOON)
        control.close()

    assert isinstance(run_concurrently(wait, close)[0], ClosedError)


def test_on_process_exit_reports_the_reason(make: Make) -> None:
    controls, groups, _ = world(make, 2)
    controls[1].on_process_exit(ValueError("no data"))
    with pytest.raises(PeerLostError, match="rank 0 of 2: rank 1 failed: ValueError: no data"):
        controls[0].exchange_unless_equal(groups[0], "x", 1, SOON)


def test_error_of() -> None:
    assert type(error_of(Cause("ClosedError", None, "x"))) is ClosedError
    assert type(error_of(Cause("ValueError", None, "x"))) is CommError
    assert type(error_of(Cause("annotations", None, "x"))) is CommError


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [WordlessError("x"), ValueError("x" * (70 << 20))])
def test_unprintable_error_is_reported(error: Exception) -> None:
    def fail(comm: un.Communicator) -> None:
        if comm.rank == 1:
            raise error
        comm.barrier()

    told, raised = un.launch(fail, 2, "thread", on_failure="continue", timeout=SOON)
    assert raised is error
    assert isinstance(told, PeerLostError)
    assert f"rank 1 failed in the program: {type(error).__name__}: " in str(told)
    assert len(str(told)) < 20_000
