"""Limits of calls in flight, of their bytes, and of concurrent functions; no limit is a deadlock."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import unisono as un
from unisono.rpc.flow_control import FlowControl
from unisono.rpc.workers import Workers
from unisono.testing import pool

rpc = un.rpc
LIMIT_S = 20.0


def test_window_limits_calls_in_flight() -> None:
    window = FlowControl(2, 100)
    now = time.monotonic()
    assert window.enter(60, now)
    assert not window.enter(60, now), "more bytes than it may hold"
    assert window.enter(40, now)
    assert not window.enter(0, now), "more calls than it may hold"
    assert window.enter(60, now, nested=True), "part of a call that is in already"
    for nbytes in (60, 60, 40):
        window.leave(nbytes)
    assert window.enter(1000, now), "a single call may be longer"


def test_caller_continues_when_the_window_has_room() -> None:
    window, entered = FlowControl(1, 100), threading.Event()
    assert window.enter(1, 0.0)

    def wait() -> None:
        if window.enter(1, time.monotonic() + LIMIT_S):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    window.leave(1)
    assert entered.wait(LIMIT_S)
    thread.join()


def test_worker_limit_excludes_waiting_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # No call is admitted because of missing progress: a slow machine may make none for a while, too.
    monkeypatch.setattr("unisono.rpc.workers._STUCK_S", LIMIT_S)
    workers = Workers("test", 2, lambda: None)
    lock, go, done = threading.Lock(), threading.Event(), threading.Semaphore(0)
    running, most = 0, 0
    pair = threading.Barrier(2)

    def task(blocks: bool) -> None:
        nonlocal running, most
        if blocks:
            with workers.not_counted():
                go.wait(LIMIT_S)
        else:
            with lock:
                running += 1
                most = max(most, running)
            # Two are let in at a time, and only together they get on.
            pair.wait(LIMIT_S)
            with lock:
                running -= 1
        done.release()

    for number in range(40):
        # Mypy cannot type a lambda's default.
        workers.run(lambda blocks=number < 20: task(blocks))  # type: ignore[misc]  # a default in a lambda has no type
    # All of the second half come through, while the first half waits.
    for _ in range(20):
        assert done.acquire(timeout=LIMIT_S)
    assert most == 2
    go.set()
    for _ in range(20):
        assert done.acquire(timeout=LIMIT_S)
    workers.close()


@rpc.expose
def weigh(tensor: torch.Tensor, depth: int) -> int:
    """Each call makes two more, to and fro."""
    if not depth:
        return int(tensor.numel())
    peer = 1 - rpc.get_worker_info().id
    return sum(torch.futures.wait_all([rpc.rpc_async(peer, weigh, (tensor, depth - 1)) for _ in range(2)]))


def narrow(comm: un.Communicator, calls: int, nbytes: int) -> Any:
    agent = rpc.init(comm, timeout=LIMIT_S, workers=2)
    for window in agent.client.calls.windows:
        window._most_calls, window._most_bytes = calls, nbytes
    comm.barrier()
    futures = [rpc.rpc_async(1 - comm.rank, weigh, (torch.ones(20_000), 3)) for _ in range(12)]
    total = sum(future.wait() for future in futures)
    rpc.shutdown(timeout=LIMIT_S)
    return total


@pytest.mark.parametrize("backend", ["thread", pytest.param("shm", marks=pytest.mark.soak), "gloo"])
def test_narrow_windows_do_not_deadlock(backend: str) -> None:
    assert pool(backend).run(narrow, 2, 100_000, size=2) == [12 * 8 * 20_000] * 2
