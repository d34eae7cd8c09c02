"""Bounded waits: for a condition, and for several concurrent calls."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["is_refused", "repeated", "run_concurrently", "wait_until"]

_POLL_S = 0.005
_POLL_AT_MOST_S = 0.05


def wait_until(condition: Callable[[], object], within_s: float = 20.0) -> bool:
    """Return whether the condition holds in time. Unreferenced objects are freed meanwhile, cycles included."""
    start = now = time.monotonic()
    collect_at = start
    while not condition():
        if now > start + within_s:
            return False
        if now >= collect_at:
            # A collection takes longer than a poll, so the interval doubles each time.
            gc.collect()
            collect_at = now + (now - start)
        # What has taken a second is seen a twentieth later. Conditions may list files or processes.
        time.sleep(min(max(_POLL_S, (now - start) / 20), _POLL_AT_MOST_S))
        now = time.monotonic()
    return True


def is_refused(address: tuple[str, int]) -> bool:
    """Return whether nothing listens at an address of this host."""
    try:
        socket.create_connection(address, 10.0).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        # It was in the queue of a listener that has closed meanwhile; the next one is refused.
        return False
    return False


def run_concurrently(*calls: Callable[[], Any], within_s: float = 40.0) -> list[Any]:
    """Run calls concurrently; return the result or the exception of each."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(within_s) for future in [pool.submit(outcome, call) for call in calls]]


@contextmanager
def repeated(call: Callable[[], object]) -> Iterator[None]:
    """In another thread, repeat a call during the context. Threads switch as often as they can."""
    interval, over = sys.getswitchinterval(), threading.Event()

    def repeat() -> None:
        while not over.is_set():
            call()

    with ThreadPoolExecutor(1) as pool:
        sys.setswitchinterval(1e-6)
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            over.set()
            sys.setswitchinterval(interval)
            repeating.result()
