"""The line in which collectives wait: order, errors, and callbacks that call again."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest

from unisono.interop.serial_queue import SerialQueue


def test_jobs_run_in_order_one_at_a_time() -> None:
    line, done = SerialQueue("test"), list[int]()
    gate = threading.Event()
    first = line.start(lambda: gate.wait(60.0))
    works = [line.start(lambda n=n: done.append(n)) for n in range(100)]
    assert not first.is_completed()
    assert done == []
    gate.set()
    line.run(lambda: done.append(100))
    assert done == list(range(101))
    assert all(work.is_completed() for work in works)


def test_empty_queue_needs_no_thread() -> None:
    line, found = SerialQueue("test"), list[int]()
    line.run(lambda: found.append(threading.get_ident()))
    assert found == [threading.get_ident()]


def test_queued_jobs_run_after_the_caller() -> None:
    line, done = SerialQueue("test"), list[str]()
    work = []

    def job() -> None:
        thread = threading.Thread(target=lambda: work.append(line.start(lambda: done.append("behind"))))
        thread.start()
        thread.join(60.0)
        done.append("caller")

    line.run(job)
    work[0].wait(60.0)
    assert done == ["caller", "behind"]


def test_errors_reach_only_the_waiter() -> None:
    line = SerialQueue("test")

    def fail() -> None:
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        line.run(fail)
    work = line.start(fail)
    with pytest.raises(KeyError, match="boom"):
        work.wait(60.0)
    after = list[int]()
    line.run(lambda: after.append(1))
    assert after == [1]


def test_callback_runs_before_queued_jobs() -> None:
    line, done = SerialQueue("test"), list[str]()
    gate = threading.Event()

    def call_again() -> None:
        line.run(lambda: done.append("called and waited for"))
        line.start(lambda: done.append("called")).wait(60.0)

    first = line.start(lambda: gate.wait(60.0))
    first.when_done(call_again)
    line.start(lambda: done.append("waiting"))
    gate.set()
    assert line.finish(10)
    assert done == ["called and waited for", "called", "waiting"]


def test_finish_has_a_timeout() -> None:
    line, gate = SerialQueue("test"), threading.Event()
    assert line.finish(0.0)
    line.start(lambda: gate.wait(60.0))
    assert not line.finish(0.01)
    gate.set()
    assert line.finish(10)


def test_exit_finishes_all_queues_although_another_thread_makes_more() -> None:
    program = """
    import sys, threading
    from collections import deque
    from unisono.interop.serial_queue import SerialQueue

    def make():
        made = deque(maxlen=20)
        while True:
            made.append(SerialQueue("passing"))

    queues = [SerialQueue("test") for _ in range(10000)]
    sys.setswitchinterval(1e-6)
    threading.Thread(target=make, daemon=True).start()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stderr == ""
