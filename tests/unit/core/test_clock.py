"""The library's clock stands still while ranks are held, and leaves Python's alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import unisono as un
from unisono.core import clock
from unisono.core.work import Completion, wait_any
from unisono.errors import CommTimeoutError
from unisono.simulation.patching import interposed


@pytest.fixture
def stopped() -> Iterator[float]:
    """The time at which the clock stands still."""
    clock.stop()
    try:
        yield clock.now()
    finally:
        clock.go()


def test_clock_stands_still_and_goes_on_from_there(stopped: float) -> None:
    kernel = time.monotonic()
    while time.monotonic() < kernel + 0.02:
        assert clock.now() == stopped
    clock.stop()
    assert clock.now() == stopped
    clock.go()
    clock.go()
    assert stopped <= clock.now() < stopped + time.monotonic() - kernel
    assert time.monotonic() - clock.now() >= 0.02


def test_clock_of_python_is_left_alone(stopped: float) -> None:
    assert type(time.monotonic) is type(len)
    assert abs(time.monotonic() - time.clock_gettime(time.CLOCK_MONOTONIC)) < 1.0
    for module, name in ((threading, "_time"), (__import__("queue"), "time")):
        assert getattr(module, name) is time.monotonic


def test_time_never_runs_backwards_while_others_stop_it() -> None:
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            clock.stop()
            clock.go()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_and_go)
        before = clock.now()
        for _ in range(5000):
            after = clock.now()
            assert after >= before
            before = after
        over.set()
        stopping.result()


def test_clock_stands_still_after_a_simulation_that_ends_meanwhile() -> None:
    with interposed:
        clock.stop()
    at = clock.now()
    try:
        with interposed:
            assert clock.now() == at
        assert clock.now() == at
    finally:
        clock.go()
    assert clock.now() > at


def test_ranks_that_are_simulated_have_a_clock_of_their_own_meanwhile(stopped: float) -> None:
    def program(comm: un.Communicator) -> tuple[float, float]:
        before = clock.now()
        time.sleep(5.0)
        return before, clock.now()

    ((before, after),) = un.simulate(program, 1).results
    assert before < 1.0
    assert 5.0 <= after < 6.0
    assert clock.now() == stopped


class Alarm:
    """An event whose timeout passes by the kernel's clock, before the library's has moved."""

    def __init__(self, *passed_s: float) -> None:
        self._passed = iter(passed_s)
        self.now_s = 0.0
        self.timeouts: list[float] = []

    def wait(self, timeout: float) -> bool:
        self.timeouts.append(timeout)
        self.now_s += next(self._passed)
        return False


def test_wait_goes_on_until_the_time_has_passed_on_this_clock() -> None:
    alarm = Alarm(0.0, 4.0, 6.0)
    with clock.virtual(lambda: alarm.now_s):
        assert not clock.wait(alarm, 10.0)
    assert alarm.timeouts == [10.0, 10.0, 6.0]


def test_waits_do_not_expire_while_the_clock_stands(stopped: float) -> None:
    work = Completion(0.01)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(wait_any, [work], 0.01), pool.submit(work.wait)]
        kernel = time.monotonic()
        while time.monotonic() < kernel + 0.05:
            assert not any(wait.done() for wait in waits)
        work.complete()
        assert [wait.result(60.0) for wait in waits] == [0, None]


def test_wait_for_any_work_ends_at_its_timeout() -> None:
    with pytest.raises(CommTimeoutError, match=r"waited 0\.01 s for any of 1 works"):
        wait_any([Completion(1.0)], 0.01)
