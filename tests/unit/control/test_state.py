"""The control plane as a pure state machine: any story, bounded memory, refusals."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from reachable import reachable

from unisono.control.state import ControlState


def test_memory_is_bounded() -> None:
    state = ControlState()
    unused = reachable(state)
    for number in range(50):
        for rank in range(2):
            state.handle(rank, 1, ("join", f"g{number}", rank, 2))
        for topic in range(20):
            for rank in range(2):
                state.handle(rank, 1, ("exchange", f"g{number}", f"t{topic}", b"x", True))
        for rank in range(2):
            state.handle(rank, 1, ("get", f"never {number}"))
            state.handle(rank, 1, ("leave", f"g{number}"))
    assert reachable(state) > unused
    for rank in range(2):
        state.handle(rank, 1, ("bye",))
    assert reachable(state) == unused


def test_last_to_leave_waits_for_a_group_that_exists() -> None:
    """Even if it is not in the group, or no longer."""
    state = ControlState()
    for rank in range(2):
        state.handle(rank, 1, ("join", "g", rank, 2))
    assert state.handle(0, 2, ("leave", "g", True)) == []
    assert state.handle(0, 3, ("leave", "g", True)) == []
    out = state.handle(1, 2, ("leave", "g"))
    assert sorted(out) == [(0, (2, "ok", None)), (0, (3, "ok", None)), (1, (2, "ok", None))]
    assert state.handle(0, 4, ("leave", "g", True)) == [(0, (4, "ok", None))]


def test_label_of_a_client_that_has_left_is_passed_on() -> None:
    left: list[str] = []
    state = ControlState(on_left=left.append)
    for client, label in enumerate(("host 1", "")):
        state.handle(client, 1, ("identify", label))
    state.handle(2, 1, ("num_keys",))
    state.handle(0, 2, ("bye",))
    for client in range(3):
        state.lost(client)
    assert left == ["host 1", ""]


verbs = st.one_of(
    st.tuples(st.just("join"), st.sampled_from("ab"), st.integers(0, 2), st.just(3)),
    st.tuples(st.just("leave"), st.sampled_from("ab")),
    st.tuples(
        st.just("exchange"), st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from([b"1", b"2"]), st.booleans()
    ),
    st.tuples(st.just("withdraw"), st.sampled_from("ab"), st.sampled_from("xy"), st.just(1.0)),
    st.tuples(st.just("stop"), st.sampled_from([None, "a"]), st.text(max_size=3)),
    st.tuples(st.just("passed"), st.sampled_from("ab"), st.integers(0, 9)),
    st.tuples(st.just("verdict"), st.sampled_from("ab")),
    st.tuples(st.just("unreported"), st.sampled_from("ab"), st.just(1.0)),
    st.tuples(st.just("fail"), st.sampled_from("ab"), st.just("AbortedError"), st.integers(0, 2), st.text(max_size=3)),
    st.tuples(st.just("get"), st.sampled_from("kl")),
    st.tuples(st.just("set"), st.sampled_from("kl"), st.binary(max_size=2)),
    st.tuples(st.just("enrol"), st.just("job"), st.integers(0, 2), st.just(3), st.sampled_from("pq")),
    st.just(("bye",)),
    st.just("lost"),
)


END: list[tuple[int, Any]] = [
    *((9, ("set", key, b"")) for key in "kl"),
    *((9, ("withdraw", group, topic, 1.0)) for group in "ab" for topic in "xy"),
    *((9, ("unreported", group, 1.0)) for group in "ab"),
]
"""What answers all that may still wait."""


@given(st.lists(st.tuples(st.integers(0, 3), verbs), max_size=60), st.booleans())
def test_every_request_is_answered_once(story: list[tuple[int, Any]], restarts: bool) -> None:
    state = ControlState(restarts=restarts)
    asked: set[tuple[int, int]] = set()
    over: set[tuple[int, int]] = set()
    for number, (client, words) in enumerate([*story, *END], start=1):
        if words != "lost" and words[0] != "passed":
            asked.add((client, number))
        out = state.lost(client) if words == "lost" else state.handle(client, number, words)
        for who, (request, outcome, body) in out:
            if request:
                assert (who, request) in asked | over
                asked.discard((who, request))
            elif outcome != "boundary":
                assert outcome == "failed"
                assert state.handle(9, 10_000, ("cause", body[0])) in (
                    [(9, (10_000, "ok", body[1:]))],
                    [(9, (10_000, "ok", None))],
                )
        if words in ("lost", ("bye",)):
            over |= {(who, what) for who, what in asked if who == client}
            asked -= over
    assert not asked


def test_register_rank() -> None:
    state = ControlState()
    assert state.handle(1, 1, ("enrol", "world", 0, 2, "p")) == [(1, (1, "ok", "world1"))]
    assert state.handle(2, 2, ("enrol", "world", 1, 2, "q")) == [(2, (2, "ok", "world1"))]
    assert state.handle(3, 3, ("enrol", "world", 0, 2, "p")) == [(3, (3, "ok", "world2"))], "a process's next init"
    refused = state.handle(4, 4, ("enrol", "world", 0, 2, "r"))
    assert [(who, reply[1]) for who, reply in refused] == [(3, "failed"), (4, "failed")], "another one beside it"
    state.lost(3)
    assert state.handle(4, 5, ("enrol", "world", 0, 2, "r")) == [(4, (5, "ok", "world3"))], "the one after it"


@pytest.mark.parametrize("end", ["bye", "lost"])
def test_rank_that_goes_while_others_join_may_register_for_the_same_group(end: str) -> None:
    def goes(client: int) -> Any:
        return state.lost(client) if end == "lost" else state.handle(client, 9, ("bye",))

    state = ControlState(restarts=True)
    state.handle(1, 1, ("enrol", "world", 0, 2, "p"))
    state.handle(1, 2, ("exchange", "world1", "init", b"", False))
    state.handle(2, 1, ("enrol", "world", 1, 2, "q"))
    assert [who for who, _ in goes(2)] == ([] if end == "lost" else [2]), "rank 0 waits"
    assert state.handle(3, 1, ("enrol", "world", 1, 2, "r")) == [(3, (1, "ok", "world1"))]
    answers = state.handle(3, 2, ("exchange", "world1", "init", b"", False))
    assert [(who, reply[1]) for who, reply in answers] == [(3, "ok"), (1, "ok")]
    assert [reply[1] for who, reply in goes(3) if who == 1] == (["failed"] if end == "lost" else []), "after all joined"
    assert state.handle(4, 1, ("enrol", "world", 1, 2, "r")) == [(4, (1, "ok", "world2"))]


@pytest.mark.parametrize("words", [(), ("nothing",), ("set", "k"), ("join", [], 0, 1), ("_forget",), "set"])
def test_malformed_requests_are_rejected(words: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        ControlState().handle(1, 1, words)


def test_owner_gets_the_last_label_of_each_client_that_leaves_or_is_lost() -> None:
    labels: list[str] = []
    state = ControlState(on_left=labels.append)
    for client in range(3):
        state.handle(client, 1, ("identify", f"client {client}"))
    state.handle(0, 2, ("identify", "client 0, done"))
    state.handle(0, 3, ("bye",))
    state.lost(0)
    state.lost(2)
    state.lost(5)
    assert labels == ["client 0, done", "client 2"]
