"""New groups of survivors and newcomers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from unisono.control.state import ControlState

OK, FAILED = "ok", "failed"


def world(size: int) -> ControlState:
    state = ControlState()
    for rank in range(size):
        state.handle(rank, 1, ("join", "world", rank, size))
    return state


def rebuild(state: ControlState, rank: int, attempt: int = 1, grow: int = 0, size: int = 3) -> list[Any]:
    return state.handle(rank, 100 + rank, ("rebuild", "world", attempt, grow, list(range(size)), b"terms"))


def test_survivors_keep_their_order() -> None:
    state = world(3)
    assert rebuild(state, 2) == []
    state.lost(1)
    assert rebuild(state, 0) == [(0, (100, OK, ("world~1", [0, 2]))), (2, (102, OK, ("world~1", [0, 2])))]


def test_rank_that_lists_other_members_is_refused_alone() -> None:
    state = world(3)
    [(client, (request, outcome, cause))] = rebuild(state, 1, size=2)
    assert (client, request, outcome) == (1, 101, FAILED)
    assert "rank 1 listed 2 members of world, which has 3 ranks" in cause[2]
    assert [rebuild(state, rank) for rank in (0, 2)] == [[], []]
    assert [client for client, _ in rebuild(state, 1)] == [0, 1, 2]


def test_rebuild_after_an_awaited_death() -> None:
    state = world(3)
    rebuild(state, 0)
    rebuild(state, 2)
    assert [(c, r[2]) for c, r in state.lost(1) if r[0] > 99] == [(0, ("world~1", [0, 2])), (2, ("world~1", [0, 2]))]


def test_death_before_joining_the_new_group_is_detected() -> None:
    state = world(3)
    for rank in range(3):
        rebuild(state, rank)
    told = [reply for client, reply in state.lost(1) if client == 0 and reply[2][0] == "world~1"]
    assert told
    assert told[0][2][1] == "PeerLostError"


def test_missing_rank_is_excluded() -> None:
    state = world(3)
    rebuild(state, 0)
    rebuild(state, 2)
    out = state.handle(0, 9, ("without", "world", 1, 2.0))
    assert (0, (100, OK, ("world~1", [0, 2]))) in out
    late = rebuild(state, 1)
    assert late[0][1][1] == FAILED
    assert late[0][1][2][0] == "AbortedError"


def test_new_ranks_are_numbered_last() -> None:
    state = world(3)
    state.lost(2)
    assert state.handle(8, 1, ("apply",)) == []
    rebuild(state, 0, grow=2)
    rebuild(state, 1, grow=2)
    out = state.handle(9, 1, ("apply",))
    members = [0, 1, 3, 4]
    assert (0, (100, OK, ("world~1", members))) in out
    assert (8, (1, OK, ("world~1", members, 2, b"terms"))) in out
    assert (9, (1, OK, ("world~1", members, 3, b"terms"))) in out


def test_missing_new_ranks() -> None:
    state = world(1)
    rebuild(state, 0, grow=1, size=1)
    out = state.handle(0, 9, ("without", "world", 1, 2.0))
    assert out[0][1][1] == FAILED
    assert "for 1 new ranks, of which 0 have joined" in out[0][1][2][2]
    state.handle(5, 1, ("apply",))
    state.handle(5, 2, ("forget", 1))
    assert rebuild(state, 0, attempt=2, grow=1, size=1) == []


def resize(state: ControlState, rank: int, size: int) -> list[Any]:
    return state.handle(rank, 100 + rank, ("rebuild", "world", 1, 0, [0, 1, 2], b"terms", size))


def test_as_many_new_ranks_as_are_missing() -> None:
    """One rank is lost before and one during the rebuild; a rank that names no size goes along."""
    state = world(3)
    state.lost(1)
    assert state.handle(8, 1, ("apply",)) == []
    assert resize(state, 0, 3) == []
    state.lost(2)
    out = state.handle(9, 1, ("apply",))
    assert (0, (100, OK, ("world~1", [0, 3, 4]))) in out
    assert [reply[2][2] for client, reply in out if client in (8, 9)] == [1, 2]
    state = world(3)
    state.lost(1)
    assert resize(state, 0, 0) == resize(state, 2, 3) == []
    assert (0, (100, OK, ("world~1", [0, 2, 3]))) in state.handle(8, 1, ("apply",))


def test_different_sizes_are_refused() -> None:
    state = world(3)
    resize(state, 0, 4)
    out = resize(state, 1, 5)
    assert {client for client, _ in out} == {0, 1}
    assert "rank 1 size=5, others size=4" in out[0][1][2][2]


def test_both_requests_of_a_rank_that_contradicts_itself_are_answered() -> None:
    state = world(3)
    state.handle(0, 7, ("rebuild", "world", 1, 0, [0, 1, 2], b"terms", 4))
    out = state.handle(0, 8, ("rebuild", "world", 1, 0, [0, 1, 2], b"terms", 5))
    assert [(client, request, outcome) for client, (request, outcome, _) in out] == [(0, 7, FAILED), (0, 8, FAILED)]


def test_newcomer_that_asks_twice_is_one_newcomer() -> None:
    state = world(1)
    assert rebuild(state, 0, grow=2, size=1) == []
    assert state.handle(8, 1, ("apply",)) == state.handle(8, 2, ("apply",)) == []
    out = state.handle(9, 1, ("apply",))
    assert [(client, request) for client, (request, _, _) in out] == [(0, 100), (8, 2), (9, 1)]


def test_newcomers_are_admitted_in_the_order_in_which_they_asked() -> None:
    """Those for whom there is no room wait for the next group; those that have stopped waiting are passed over."""
    state = world(1)
    for client in (9, 8, 7, 6):
        assert state.handle(client, 1, ("apply",)) == []
    assert state.handle(8, 2, ("forget", 1)) == [(8, (2, OK, None))]
    out = rebuild(state, 0, grow=2, size=1)
    assert [(client, body[2:]) for client, (_, _, body) in out[1:]] == [(9, (1, b"terms")), (7, (2, b"terms"))]
    out = rebuild(state, 0, attempt=2, grow=1, size=1)
    assert [(client, body[2:]) for client, (_, _, body) in out[1:]] == [(6, (1, b"terms"))]


def test_ranks_that_are_there_are_not_left_out() -> None:
    state = world(3)
    state.lost(1)
    resize(state, 0, 1)
    out = resize(state, 2, 1)
    assert [client for client, _ in out] == [0, 2]
    assert out[0][1][2][2] == "rebuild(size=1) cannot leave out any of the 2 ranks that are there"


@given(order=st.permutations(range(5)), dead=st.sets(st.integers(0, 4), max_size=4), when=st.integers(0, 4))
def test_survivors_get_equal_results_in_any_order(order: list[int], dead: set[int], when: int) -> None:
    state, told = world(5), {}
    for index, rank in enumerate(order):
        out = [reply for victim in dead for reply in state.lost(victim)] if index == when else []
        if rank not in dead:
            out += rebuild(state, rank, size=5)
        told.update({client: reply[2] for client, reply in out if reply[0] > 99 and reply[1] == OK})
    alive = sorted(set(range(5)) - dead)
    assert told == dict.fromkeys(alive, ("world~1", alive))
