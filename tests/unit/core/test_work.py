"""Works: the first of several to end, whatever they are made of."""

from __future__ import annotations

import threading

import pytest

from unisono.core.work import Completion, wait_any
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
