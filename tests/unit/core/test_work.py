"""Works: the first of several to end, whatever they are made of, and those that run in the thread that waits."""

from __future__ import annotations

import threading

import pytest

from unisono.core import clock
from unisono.core.work import Completion, Deferred, wait_any
from unisono.errors import CommTimeoutError


def test_first_completed_work_is_returned() -> None:
    works = [Completion(30.0) for _ in range(3)]
    threading.Thread(target=works[1].complete).start()
    assert wait_any(works, timeout=20.0) == 1
    works[2].complete()
    works[0].complete(ValueError("its own"))
    assert wait_any(works, timeout=20.0) == 0


class Modest(Completion):
    """It says only by its future that it has ended."""

    def is_completed(self) -> bool:
        return False


def test_wait_any_accepts_futures() -> None:
    works = [Modest(30.0), Modest(30.0)]
    works[1].complete()
    assert wait_any(works, timeout=20.0) == 1


def test_wait_any_timeout_and_empty_list() -> None:
    with pytest.raises(CommTimeoutError, match=r"waited 0\.01 s for any of 2 works"):
        wait_any([Completion(30.0), Completion(30.0)], timeout=0.01)
    with pytest.raises(ValueError, match="at least one"):
        wait_any([])


def test_deferred_work_is_tried_once_without_time() -> None:
    tries: list[bool] = []
    runs: list[float] = []

    def ready() -> bool:
        tries.append(len(tries) >= 3)
        return tries[-1]

    work = Deferred(runs.append, 30.0, ready)
    began = clock.real()
    # Each try takes 2 s of the clock.
    with clock.virtual(lambda: clock.real() + 2.0 * len(tries)):
        with pytest.raises(CommTimeoutError) as caught:
            work.wait(0)
        assert tries == [False]
        assert caught.value.waited_s is not None
        assert caught.value.waited_s >= 2.0
        with pytest.raises(CommTimeoutError) as caught:
            work.wait(1.0)
        assert tries == [False] * 3
        assert caught.value.waited_s is not None
        assert caught.value.waited_s >= 4.0
        assert not runs
        work.wait(0)
        assert runs[0] >= began + 30.0
    assert work.is_completed()
