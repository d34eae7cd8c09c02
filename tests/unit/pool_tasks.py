"""Tasks of the tests of pools: functions that workers import by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unisono as un

GATES: dict[int, threading.Event] = {}
"""Gates that hold tasks of ranks which are threads."""
RUNS: Counter[int] = Counter()
"""How many times each of the tasks below has run in this process."""


class DeathError(BaseException):
    """Ends a worker that is a thread: an error that cannot be sent to rank 0 either."""

    def __str__(self) -> str:
        raise self


@dataclass
class Point:
    x: float
    y: float


@un.rpc.expose
def square(x: Any) -> Any:
    return x * x


@un.rpc.expose
def divide(x: int, y: int, *, plus: int = 0) -> float:
    return x / y + plus


@un.rpc.expose
def flip(point: Point) -> Point:
    return Point(point.y, point.x)


def same_class(value: object) -> tuple[bool, object]:
    """Return whether the value is of this module's class, and the value."""
    return type(value) is Point, value


def hold(number: int) -> str:
    """Wait at a gate."""
    assert GATES[number].wait(60)
    return "held"


def unsendable() -> Any:
    return threading.Lock()


def die_once(index: int, deadly: set[int]) -> int:
    """Count a run, and end the worker if this is the first run of a deadly task."""
    RUNS[index] += 1
    if index in deadly and RUNS[index] == 1:
        raise DeathError
    return square(index)


def kill_once(index: int, deadly: set[int], folder: str) -> int:
    """Note a run in a file, and kill the process if this is the first run of a deadly task."""
    runs = Path(folder, str(index))
    with runs.open("a") as file:
        file.write("x")
    if index in deadly and runs.read_text() == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    return square(index)


def kill_always() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_offset(value: int) -> None:
    os.environ["POOL_TEST_OFFSET"] = str(value)


def read_offset(x: int) -> int:
    return x + int(os.environ["POOL_TEST_OFFSET"])


def fail_to_begin() -> None:
    raise LookupError("no licence")


def thread_of(_: int) -> int:
    return threading.get_ident()


def raise_of_kind(kind: type[BaseException]) -> None:
    raise kind("mine")


def compute(seconds: float) -> int:
    """Compute for a time, and return which thread did."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return threading.get_ident()
