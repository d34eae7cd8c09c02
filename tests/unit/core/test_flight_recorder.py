"""The frames of all threads, of which reports of hangs are made."""

from __future__ import annotations

import gc
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import unisono as un
from unisono.communicator import engine_of
from unisono.core.flight_recorder import callers_places, site_text, thread_frames
from unisono.testing import run_ranks

Start = Callable[..., "subprocess.Popen[str]"]


def test_a_collection_meanwhile_is_no_deadlock(start: Start) -> None:
    process = start(
        """
        import gc, threading, time
        from unisono.core.flight_recorder import callers_places, site_text, thread_frames

        class Cycle:
            def __init__(self):
                self.me = self

            def __del__(self):
                time.sleep(0)

        def look():
            for _ in range(1000):
                Cycle()
                assert threading.get_ident() in thread_frames()

        gc.set_threshold(5)
        end = threading.Event()
        idle = [threading.Thread(target=end.wait) for _ in range(12)]
        looking = [threading.Thread(target=look) for _ in range(2)]
        for thread in idle + looking:
            thread.start()
        for thread in looking:
            thread.join()
        end.set()
        print(gc.isenabled())
        """
    )
    assert process.communicate(timeout=300) == ("True\n", "")


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_callers_stay_the_same_while_their_thread_runs_on(eager_collector: None) -> None:
    """A collection lets it run, which any new object may begin."""
    waits, on, elsewhere, over = (threading.Event() for _ in range(4))

    def outer() -> None:
        middle()

    def middle() -> None:
        inner()

    def inner() -> None:
        waits.set()
        on.wait(60.0)

    def another(depth: int) -> None:
        if depth:
            another(depth - 1)
        else:
            elsewhere.set()
            over.wait(60.0)

    def run() -> None:
        outer()
        another(20)

    def collecting(phase: str, info: object) -> None:
        if threading.current_thread() is walker and not on.is_set():
            on.set()
            elsewhere.wait(60.0)

    walker = threading.current_thread()
    thread = threading.Thread(target=run)
    thread.start()
    assert waits.wait(60.0)
    frame = thread_frames()[thread.ident or 0]
    names = []
    gc.callbacks.append(collecting)
    gc.disable()
    gc.set_threshold(1)
    try:
        while frame is not None:
            names.append(frame.f_code.co_name)
            gc.enable()
            caller = frame.f_back
            gc.disable()
            frame = caller
    finally:
        gc.enable()
        gc.callbacks.remove(collecting)
        on.set()
        over.set()
        thread.join()
    assert names[names.index("inner") :][:4] == ["inner", "middle", "outer", "run"]


def test_lines_of_calls_in_context_managers_are_the_programs(tmp_path: Path) -> None:
    """Also where Python's own modules call the library's code."""

    def program(comm: un.Communicator) -> list[str]:
        with un.trace(tmp_path / "with.json", comm):
            comm.barrier()
        with ExitStack() as stack:
            stack.enter_context(un.trace(tmp_path / "stack.json", comm))
            stack.callback(comm.barrier)
        return engine_of(comm).activity.last(1000)

    for calls in run_ranks(program, 2):
        assert len(calls) > 60
        assert {call.rpartition(" at ")[2].partition(":")[0] for call in calls} == {"test_flight_recorder.py"}


def test_line_of_a_package_and_the_users_line_that_led_there() -> None:
    package: dict[str, Callable[..., object]] = {}
    exec(compile("def calls(function):\n    return function()", "/site-packages/package.py", "exec"), package)
    place, users = map(site_text, callers_places())
    assert place == users
    place, users = map(site_text, package["calls"](callers_places))
    assert place == "package.py:2"
    assert str(users).startswith("test_flight_recorder.py:")
