"""The comparison of calls as a pure state machine, with a clock that the test turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from unisono import serialization
from unisono.control.report_ring import REPORT_BYTES, ReportWriter
from unisono.control.watched_calls import CALL, WatchedCalls
from unisono.core.call import Fingerprint, hash_of
from unisono.core.frames import Kind
from unisono.diagnostics.hang_report import BlockedRank
from unisono.host.anonymous_files import create_file

SUM = Fingerprint(0, "all_reduce", "sum", None, "torch.float32", (4,), site="train.py:7")


class Watched:
    """A monitor, with ranks that attend and have one group of all of them, and another of the first two."""

    def __init__(self, size: int = 2) -> None:
        self.time = 0.0
        self.state = WatchedCalls(lambda: self.time)
        self.told: dict[int, list[tuple[str, int | None, str]]] = {rank: [] for rank in range(size)}
        self.answers: dict[int, list[str]] = {rank: [] for rank in range(size)}
        self.overdue: tuple[int, str] | None = None
        self.ended = False
        self.quiet = False
        self._signatures = dict.fromkeys(range(size), 0)
        for rank in range(size):
            self.ask(rank, "join", "w", rank, size, [*range(size)])
            self.ask(rank, "attend", "w", 0, b"")
            self.ask(rank, "group", "0", "world", [*range(size)], 10.0)
            self.ask(rank, "group", "1", "the first two", [0, 1], 10.0)

    def ask(self, rank: int, *words: Any) -> None:
        self.take(self.state.handle(rank, 1, words))

    def take(self, out: Sequence[tuple[int, tuple[int, str, Any]]]) -> None:
        for client, (request, outcome, body) in out:
            if outcome == "failed" and not request:
                self.told[client].append(tuple(body[1:]))
            elif client in self.answers:
                self.answers[client].append(outcome)

    def call(self, rank: int, number: int, signature: Fingerprint = SUM, *, group: int = 0, **how: Any) -> None:
        index = self._signatures[rank]
        self._signatures[rank] += 1
        self.ask(rank, "signature", index, serialization.encode(signature.values()))
        same = hash_of(signature._replace(op=None).compared())
        content = CALL.pack(group, number, same, index, how.get("op", 0))
        if how.get("asks"):
            self.ask(rank, "compare", content)
        else:
            self.take(self.state.called(rank, content))

    def pass_time(self, seconds: float, *blocked: BlockedRank) -> None:
        self.time += seconds
        out = self.state.handle(99, 1, ("examine", serialization.encode([tuple(each) for each in blocked])))
        self.ended, self.quiet, self.overdue = out[-1][1][2]
        self.take(out)

    def verdict(self, rank: int = 0) -> tuple[str, int | None, str]:
        (found,) = self.told[rank]
        return found


@pytest.mark.parametrize(
    "entry",
    [
        5,
        (0, "0", 1, "all_reduce", 0.5, ()),
        (0, "0", 1, "all_reduce", 0.5, (), False, "more"),
        (0, "0", "1", "all_reduce", 0.5, (), False),
        (0, "0", 1, "all_reduce", 0.5, ("1",), False),
        (0, "0", 1, "all_reduce", 0.5, 1, False),
    ],
)
def test_malformed_blocked_rank_is_refused_before_anything_changes(entry: object) -> None:
    watched = Watched(3)
    watched.call(0, 1)
    watched.call(1, 1, SUM._replace(counts=(5,)))
    watched.time += 1.0
    good = (2, "0", None, "recv", 0.7, (0,), False)
    with pytest.raises(TypeError):
        watched.state.handle(99, 1, ("examine", serialization.encode([good, entry])))
    assert not any(watched.told.values())
    # The failure is still there to be found.
    watched.pass_time(0.0, BlockedRank(*good))
    assert watched.verdict()[0] == "MismatchError"


def test_equal_calls_fail_nothing_and_leave_nothing() -> None:
    watched = Watched(3)
    for number in range(1, 5):
        for rank in range(3):
            watched.call(rank, number)
    watched.pass_time(100.0)
    assert not any(watched.told.values())
    assert watched.overdue is None
    assert not any(group.calls for group in watched.state._known.values())


@pytest.mark.parametrize("change", [{"operation": "broadcast", "root": 0}, {"dtype": "torch.int32"}, {"counts": (5,)}])
def test_difference_is_quoted_for_all(change: dict[str, Any]) -> None:
    watched = Watched()
    watched.call(0, 1)
    watched.call(1, 1, SUM._replace(site="train.py:9", **change))
    for rank in range(2):
        kind, _, text = watched.verdict(rank)
        assert kind == "MismatchError"
        assert "ranks differ in" in text
        assert "train.py:7" in text
        assert "train.py:9" in text


def test_unknown_reduce_operation_differs_from_none() -> None:
    watched = Watched()
    watched.call(0, 1, op=1)
    watched.call(1, 1, op=0)
    assert not watched.told[0]
    watched.call(0, 2, op=1)
    watched.call(1, 2, SUM._replace(op="max"), op=2)
    assert "ranks differ in op" in watched.verdict()[2]


def test_unknown_reduce_operation_is_not_named_as_a_difference() -> None:
    watched = Watched()
    watched.call(0, 1, op=1)
    watched.call(1, 1, SUM._replace(op=None, counts=(5,)))
    assert "ranks differ in counts: " in watched.verdict()[2]


def test_difference_is_reported_while_a_rank_is_missing() -> None:
    watched = Watched(3)
    watched.call(0, 1)
    watched.call(1, 1, SUM._replace(counts=(5,)))
    watched.pass_time(0.05)
    assert not watched.told[2]
    watched.pass_time(0.1)
    assert "rank 2 has not made it" in watched.verdict(2)[2]


def test_splits_are_compared_in_pairs() -> None:
    watched = Watched()
    mine = Fingerprint(0, "all_to_all_single", sends=(2, 3), receives=(2, 2))
    watched.call(0, 1, mine)
    watched.call(1, 1, mine._replace(sends=(2, 2), receives=(3, 2)))
    assert not watched.told[0]
    watched.call(0, 2, mine)
    watched.call(1, 2, mine)
    assert "rank 0 sends 3 elements to rank 1, which expects 2" in watched.verdict()[2]


def test_answer_comes_when_all_have_made_the_call() -> None:
    watched = Watched()
    before = [*watched.answers[0]]
    watched.call(0, 1, asks=True)
    assert watched.answers[0] == before
    watched.call(1, 1, asks=True)
    assert watched.answers[0] == [*before, "ok"]
    watched.call(0, 2, asks=True)
    watched.call(1, 2, SUM._replace(dtype="torch.int8"), asks=True)
    assert watched.answers[0][-1] == watched.answers[1][-1] == "failed"
    assert "Nothing was sent" in watched.verdict()[2]


def in_call(rank: int, group: int = 0, for_s: float = 0.6, **how: Any) -> BlockedRank:
    """A rank that has been in its first collective for long enough to count as blocked."""
    return BlockedRank(rank, str(group), how.get("number", 1), "all_reduce #1", for_s, (), how.get("aside", False))


def in_message(rank: int, *peers: int, for_s: float = 0.6) -> BlockedRank:
    return BlockedRank(rank, "0", None, f"recv (from rank {peers}) at train.py:4", for_s, peers, False)


def test_overlapping_calls_of_groups_are_no_deadlock() -> None:
    watched = Watched()
    for rank, groups in enumerate(((0, 1), (1, 0))):
        watched.call(rank, 1, group=groups[0])
    watched.pass_time(5.0)
    assert not watched.told[0]
    for rank, groups in enumerate(((0, 1), (1, 0))):
        watched.call(rank, 1, group=groups[1])
    watched.pass_time(50.0)
    assert not watched.told[0]
    assert watched.overdue is None


def test_waits_for_each_other_are_a_deadlock() -> None:
    watched = Watched()
    watched.call(0, 1)
    watched.call(1, 1, group=1)
    assert not watched.quiet
    watched.pass_time(0.4, in_call(0, for_s=0.4), in_call(1, 1, for_s=0.4))
    assert watched.quiet
    assert not watched.told[0]
    watched.pass_time(0.2, in_call(0), in_call(1, 1))
    kind, _, text = watched.verdict(1)
    assert kind == "DeadlockError"
    assert "rank 0 waits for rank 1 in all_reduce" in text
    assert "of the first two" in text


def test_other_threads_may_make_the_awaited_call() -> None:
    watched = Watched()
    watched.call(0, 1)
    watched.call(1, 1, group=1)
    watched.pass_time(0.6, in_call(0), in_call(1, 1, aside=True))
    assert not watched.told[0]


def test_cycle_is_found_behind_a_rank_that_is_merely_late() -> None:
    watched = Watched(3)
    # Ranks 1 and 2 have not made this call, and rank 1 is still computing.
    watched.call(0, 1)
    watched.pass_time(0.6, in_call(0), in_message(2, 0))
    assert "rank 0 waits for rank 2" in watched.verdict(1)[2]


@pytest.mark.parametrize("size", [2, 4])
def test_receives_from_each_other_are_a_deadlock(size: int) -> None:
    watched = Watched(size)
    circle = [in_message(rank, (rank + 1) % size) for rank in range(size)]
    watched.pass_time(0.6, *circle[1:])
    # The answers are forgotten: what ranks wait for may have changed.
    watched.pass_time(0.6, circle[0])
    assert not watched.told[0]
    watched.pass_time(0.6, *circle)
    kind, _, text = watched.verdict(1)
    assert kind == "DeadlockError"
    assert text.count(" waits for rank ") == size
    assert "rank 0 waits for rank 1 in recv (from rank (1,)) at train.py:4 of world" in text


def test_message_and_collective_are_a_deadlock() -> None:
    watched = Watched()
    watched.call(1, 1)
    watched.pass_time(0.6, in_message(0, 1), in_call(1))
    assert watched.verdict()[0] == "DeadlockError"


def test_message_that_does_not_come_is_overdue() -> None:
    watched = Watched()
    watched.pass_time(0.6, in_message(0, 1, for_s=9.0))
    assert watched.overdue is None
    watched.pass_time(0.6, in_message(0, 1, for_s=11.0))
    assert watched.overdue is not None
    assert watched.overdue[0] == 1
    assert watched.overdue[1].startswith("rank 0 has waited 11.0 s for rank 1 in recv")
    watched.pass_time(0.6, in_message(1, for_s=11.0))
    assert watched.overdue[0] is None
    assert watched.overdue[1].startswith("rank 1 has waited 11.0 s in recv")


def test_rank_that_has_ended_is_named_although_another_is_late() -> None:
    watched = Watched(4)
    watched.take(watched.state.lost(2))
    watched.call(0, 1)
    assert watched.verdict()[:2] == ("PeerLostError", 2)


def test_rank_that_does_not_come_is_overdue() -> None:
    watched = Watched()
    watched.call(0, 1)
    watched.pass_time(9.9)
    assert watched.overdue is None
    watched.pass_time(0.2)
    assert watched.overdue is not None
    rank, text = watched.overdue
    assert rank == 1
    assert "rank 0 has waited 10.1 s for rank 1 in all_reduce(sum, torch.float32, 4 elements) at train.py:7" in text


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_rooted_call_waits_as_its_direction_says(operation: str) -> None:
    watched = Watched()
    call = SUM._replace(operation=operation, root=0)
    first, second = (0, 1) if operation == "broadcast" else (1, 0)
    watched.call(first, 1, call)
    watched.pass_time(50.0)
    assert watched.overdue is None
    watched.call(second, 1, call)
    watched.call(second, 2, call)
    watched.pass_time(11.0)
    assert watched.overdue is not None


def test_rank_that_has_ended_fails_those_that_need_it() -> None:
    watched = Watched()
    watched.call(0, 1)
    watched.call(1, 1)
    watched.ask(1, "bye")
    watched.pass_time(50.0)
    assert not watched.told[0]
    watched.call(0, 2)
    kind, rank, text = watched.verdict()
    assert (kind, rank) == ("PeerLostError", 1)
    assert "Rank 0 waits for it in all_reduce" in text


def test_rank_that_was_lost_in_a_call_fails_the_others_at_once() -> None:
    watched = Watched()
    watched.call(0, 1)
    watched.take(watched.state.lost(1))
    assert watched.verdict()[:2] == ("PeerLostError", 1)
    assert "was lost" in watched.verdict()[2]


def test_error_that_follows_waits_for_its_cause() -> None:
    watched = Watched()
    watched.ask(0, "fail", "w", "PeerLostError", 0, "rank 0 failed: RuntimeError: Connection closed by peer [::1]:1")
    watched.pass_time(0.5)
    assert not watched.told[0]
    watched.ask(1, "fail", "w", "PeerLostError", 1, "rank 1 failed: KeyError: 'x'")
    assert "KeyError" in watched.verdict()[2]
    watched.pass_time(5.0)
    assert "KeyError" in watched.verdict()[2]


def test_error_that_follows_is_reported_if_nothing_else_is() -> None:
    watched = Watched()
    watched.ask(0, "fail", "w", "PeerLostError", 0, "rank 0 failed: RuntimeError: Connection closed by peer [::1]:1")
    watched.pass_time(1.1)
    assert watched.verdict()[:2] == ("PeerLostError", 0)


def test_error_that_follows_names_a_rank_that_has_ended() -> None:
    watched = Watched()
    watched.ask(1, "bye")
    watched.ask(0, "fail", "w", "PeerLostError", 0, "rank 0 failed: RuntimeError: Connection closed by peer [::1]:1")
    watched.pass_time(1.1)
    kind, rank, text = watched.verdict()
    assert (kind, rank) == ("PeerLostError", 1)
    assert "rank 1 has ended" in text
    assert "Then rank 0 failed" in text


def test_call_that_has_failed_needs_no_other_rank() -> None:
    watched = Watched(3)
    for rank in range(2):
        watched.call(rank, 1)
        watched.ask(rank, "abandon", 0, 1)
    watched.pass_time(50.0)
    assert watched.overdue is None
    watched.ask(2, "bye")
    assert not watched.told[0]


def test_call_that_one_rank_has_abandoned_is_still_awaited_by_another() -> None:
    watched = Watched(3)
    watched.call(0, 1)
    watched.ask(0, "abandon", 0, 1)
    watched.call(1, 1)
    watched.pass_time(50.0)
    assert watched.overdue is not None
    assert watched.overdue[1].startswith("rank 1 has waited")
    watched.call(2, 1, SUM._replace(counts=(5,)))
    assert "ranks differ in counts" in watched.verdict()[2]


def test_nothing_is_compared_after_a_rank_has_ended_the_watch() -> None:
    watched = Watched()
    watched.call(0, 1, asks=True)
    watched.ask(1, "finish")
    assert watched.answers[0][-1] == "ok"
    watched.ask(1, "bye")
    watched.call(0, 2, asks=True)
    assert watched.answers[0][-1] == "ok"
    watched.pass_time(50.0, in_message(0, 1, for_s=50.0))
    assert not watched.told[0]
    assert watched.overdue is None


def test_monitor_ends_with_its_last_rank() -> None:
    watched = Watched()
    watched.pass_time(100.0)
    assert not watched.ended
    watched.ask(0, "bye")
    watched.take(watched.state.lost(1))
    watched.pass_time(0.0)
    assert watched.ended


def test_monitor_that_nobody_attends_ends() -> None:
    watched = Watched(0)
    watched.pass_time(59.0)
    assert not watched.ended
    watched.pass_time(2.0)
    assert watched.ended


def test_only_members_report_calls() -> None:
    watched = Watched()
    with pytest.raises(ValueError, match="only a member"):
        watched.ask(7, "attend", "w", 0, b"")


def reporting(watched: Watched, rank: int) -> ReportWriter:
    """Let a rank report through shared memory from now on."""
    with create_file("test", REPORT_BYTES) as handle:
        writer = ReportWriter(handle, lambda: False)
        watched.ask(rank, "attend", "w", 0, handle)
    for name, members in (("0", (0, 1, 2)), ("1", (0, 1))):
        words = "group", name, "world", list(members), 10.0
        writer.write(Kind.REQUEST, serialization.encode((0, words)), 1.0)
    return writer


def report(writer: ReportWriter, number: int, signature: Fingerprint = SUM) -> None:
    writer.write(Kind.REQUEST, serialization.encode((0, ("signature", 0, serialization.encode(signature.values())))), 1)
    same = hash_of(signature._replace(op=None).compared())
    writer.write(Kind.CALL, CALL.pack(0, number, same, 0, 0), 1.0)


@pytest.mark.parametrize("event", ["examined", "lost", "finished", "asked"])
def test_reports_in_shared_memory_count_before_what_follows(event: str) -> None:
    watched = Watched(3)
    watched.call(1, 1)
    watched.call(2, 1)
    report(reporting(watched, 0), 1, SUM._replace(counts=(5,)))
    assert not watched.told[1]
    if event == "examined":
        watched.pass_time(0.01)
    elif event == "lost":
        watched.take(watched.state.lost(0))
    elif event == "finished":
        watched.ask(0, "bye")
    else:
        watched.ask(0, "compare", CALL.pack(0, 2, 0, 0, 0))
    assert watched.verdict(1)[0] == "MismatchError"
    assert "ranks differ in counts" in watched.verdict(1)[2]


def test_rank_with_unreadable_reports_is_lost() -> None:
    watched = Watched(3)
    reporting(watched, 0).write(Kind.CALL, b"too short", 1.0)
    watched.call(1, 1)
    watched.pass_time(0.01)
    kind, rank, text = watched.verdict(1)
    assert (kind, rank) == ("PeerLostError", 0)
    assert "rank 0 was lost: its reports cannot be read" in text


def test_memory_that_cannot_be_opened_is_not_used() -> None:
    watched = Watched()
    out = watched.state.handle(0, 7, ("attend", "w", 0, bytes(40)))
    assert out == [(0, (7, "ok", False))]
