"""Works made of other works: a continuation runs once, and a group ends with its last work or the first error."""

from __future__ import annotations

import pytest

from unisono.core.work import ChainedWork, Completion, WorkGroup
from unisono.errors import CommTimeoutError


class Polled(Completion):
    """Work that ends at its third look."""

    looks = 0

    def is_completed(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.complete()
        return super().is_completed()


def test_continuation_runs_once_and_only_after_success() -> None:
    inner, calls = Completion(0.0), list[int]()
    work = ChainedWork(inner, lambda: calls.append(1))
    future = work.get_future()
    with pytest.raises(CommTimeoutError):
        work.wait()
    assert not work.is_completed()
    assert calls == []
    inner.complete()
    work.wait()
    future.wait()
    assert work.is_completed()
    assert calls == [1]
    failed = Completion(0.0)
    failed.complete(ValueError("its own"))
    work = ChainedWork(failed, lambda: calls.append(2))
    with pytest.raises(ValueError, match="its own"):
        work.wait()
    assert work.is_completed()
    assert calls == [1]


def test_continuation_error_is_raised_by_every_wait() -> None:
    inner = Completion(0.0)
    inner.complete()

    def fail() -> None:
        raise ValueError("it cannot go on")

    work = ChainedWork(inner, fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="it cannot go on"):
            work.wait()
    with pytest.raises(ValueError, match="it cannot go on"):
        work.get_future().wait()
    assert isinstance(work.exception(), ValueError)


def test_errors_are_translated_everywhere() -> None:
    inner = Completion(0.0)
    inner.complete(KeyError("inner"))
    work = ChainedWork(inner, translate=lambda error: ValueError(f"outer {error}"))
    with pytest.raises(ValueError, match="outer 'inner'"):
        work.wait()
    with pytest.raises(ValueError, match="outer 'inner'"):
        work.get_future().wait()
    assert isinstance(work.exception(), ValueError)


def test_group_completes_with_its_last_work() -> None:
    works = [Completion(0.0), Completion(0.0)]
    group = WorkGroup(works)
    future = group.get_future()
    works[0].complete()
    assert not group.is_completed()
    assert not future.done()
    with pytest.raises(CommTimeoutError):
        group.wait(0.01)
    works[1].complete()
    group.wait()
    future.wait()
    assert group.is_completed()
    WorkGroup([]).get_future().wait()


def test_group_fails_with_the_first_error() -> None:
    works = [Completion(0.0), Completion(0.0)]
    group = WorkGroup(works)
    future = group.get_future()
    works[1].complete(ValueError("its own"))
    assert group.is_completed()
    with pytest.raises(ValueError, match="its own"):
        future.wait()
    assert isinstance(group.exception(), ValueError)


def test_later_works_progress_during_a_wait() -> None:
    first, second = Completion(30.0), Polled(30.0)

    def end_first() -> None:
        first.complete()

    second.when_done(end_first)
    WorkGroup([first, second], timeout_s=20.0, poll_s=0.001).wait()
    assert second.looks >= 3
    with pytest.raises(CommTimeoutError):
        WorkGroup([Completion(30.0), Polled(30.0)], timeout_s=0.01, poll_s=0.001).wait()
