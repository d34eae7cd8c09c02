"""Loops of asyncio in a simulation: they sleep in virtual time, and threads wake them."""

from __future__ import annotations

import asyncio
import time

import pytest

import unisono as un
from unisono.errors import DeadlockError


async def ticks(seconds: float, number: int) -> float:
    for _ in range(number):
        await asyncio.sleep(seconds)
    return round(time.monotonic(), 2)


async def much() -> list[object]:
    found: list[object] = list(await asyncio.gather(ticks(600.0, 4), ticks(500.0, 3)))
    # A thread, which sleeps too, wakes the loop when it has ended.
    await asyncio.to_thread(time.sleep, 5.5)
    found.append(round(time.monotonic(), 2))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 3600)
    return [*found, round(time.monotonic(), 2)]


def test_event_loop_sleeps_in_virtual_time() -> None:
    def program(comm: un.Communicator) -> list[object]:
        found = asyncio.run(much())
        comm.barrier()
        return found

    started = time.monotonic()
    first, again = un.simulate(program, 2, seed=3), un.simulate(program, 2, seed=3)
    assert time.monotonic() - started < 60
    assert first.results == [[2400.0, 1500.0, 2405.5, 6005.5]] * 2
    assert first.digest == again.digest
    # It is taken back.
    assert asyncio.run(ticks(0.0, 1)) > 0


def test_idle_event_loops_are_a_deadlock() -> None:
    def program(comm: un.Communicator) -> None:
        asyncio.run(asyncio.wait_for(asyncio.Event().wait(), None))

    with pytest.raises(DeadlockError, match=r"(?s)no rank can continue.*rank \d has made no call"):
        un.simulate(program, 2, seed=1)
