"""What the end of a rank changes for the others, whatever they are: their time, and whether it is started again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from unisono.control.local import LocalHub
from unisono.core.control import ControlPlane
from unisono.errors import PeerLostError
from unisono.launcher.supervisor import GRACE_S, Outcome, Supervisor, joined, lost


class Script:
    """Ranks that end as written, round by round; records how they were started, and the limits of the waits."""

    def __init__(self, *rounds: Iterable[Outcome]) -> None:
        self._rounds: Iterator[Iterable[Outcome]] = iter(rounds)
        self.started: list[tuple[int, int]] = []
        self.limits: list[float | None] = []

    def start(self, rank: int, attempt: int) -> None:
        self.started.append((rank, attempt))

    def ends(self, limit_s: float | None) -> Iterable[Outcome]:
        self.limits.append(limit_s)
        return next(self._rounds)

    def supervised(self, size: int, on_failure: str = "end", control: ControlPlane | None = None) -> Supervisor:
        return Supervisor(self.start, self.ends, range(size), on_failure, control)


def failed(rank: int) -> Outcome:
    return Outcome(rank, error=ValueError())


def ranks_of(ended: list[Outcome]) -> list[int]:
    return [outcome.rank for outcome in ended]


def test_first_failure_alone_limits_the_others() -> None:
    script = Script([Outcome(2)], [failed(0)], [failed(3)], [], [Outcome(1)])
    assert ranks_of(script.supervised(4).run()) == [2, 0, 3, 1]
    assert script.started == [(0, 0), (1, 0), (2, 0), (3, 0)]
    before, after = script.limits[:2], script.limits[2:]
    assert before == [None, None]
    assert all(limit is not None and limit <= GRACE_S for limit in after)
    assert after == sorted(after, key=lambda limit: -(limit or 0.0))


def test_failure_limits_nobody_where_survivors_continue() -> None:
    script = Script([failed(0)], [Outcome(1)])
    assert ranks_of(script.supervised(2, "continue").run()) == [0, 1]
    assert script.limits == [None, None]


def test_ranks_that_run_at_the_limit_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 1.0, 5.0])
    monkeypatch.setattr("unisono.core.clock.now", lambda: next(times))
    script = Script([Outcome(1)], [])
    supervisor = script.supervised(3)
    assert ranks_of(supervisor.run(limit_s=4.0)) == [1]
    assert supervisor.open == {0, 2}
    assert script.limits == [4.0, 3.0]


def test_limit_set_from_outside_holds_whatever_fails() -> None:
    script = Script([failed(0)], [Outcome(1)])
    supervisor = script.supervised(2)
    supervisor.limit(100.0)
    supervisor.wait()
    assert all(limit is not None and limit > 90 for limit in script.limits)


def test_lost_rank_is_started_again_until_two_have_not_joined() -> None:
    control = LocalHub().control()
    script = Script([lost(1, 2, "is gone")], [lost(1, 2, "is gone")], [lost(1, 2, "is gone")], [Outcome(0)])
    ended = script.supervised(2, "replace", control).run()
    assert script.started == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert ranks_of(ended) == [1, 0]


def test_replacement_that_has_joined_counts_as_a_first_rank() -> None:
    control = LocalHub().control()
    gone = [[lost(1, 2, "is gone")] for _ in range(4)]
    script = Script(*gone, [Outcome(0), Outcome(1)])
    for attempt in range(1, 5):
        control.set(joined(1, attempt), b"")
    assert ranks_of(script.supervised(2, "replace", control).run()) == [0, 1]
    assert script.started[-1] == (1, 4)


def test_replacement_is_not_waited_for_when_nobody_is_left_to_admit_it() -> None:
    script = Script([lost(1, 2, "is gone")], [Outcome(0)])
    ended = script.supervised(2, "replace", LocalHub().control()).run()
    assert ranks_of(ended) == [0, 1]
    with pytest.raises(PeerLostError, match="the other ranks ended before a replacement had joined them"):
        raise ended[1].error or AssertionError


def test_error_of_a_program_ends_replacing() -> None:
    script = Script([failed(0)], [lost(1, 3, "is gone")], [Outcome(2)])
    assert ranks_of(script.supervised(3, "replace", LocalHub().control()).run()) == [0, 1, 2]
    assert script.started == [(0, 0), (1, 0), (2, 0)]
