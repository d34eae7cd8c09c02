"""Ranks that cannot share memory, for want of the same native core or another reason: refused, on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import unisono as un
from unisono.control import LocalHub
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.errors import CommError, UnavailableError
from unisono.interop import from_store
from unisono.launcher import api
from unisono.transports import TRANSPORTS
from unisono.transports.shm import segment, transport

NO_CORE = "backend 'shm' needs unisono's native core: install a wheel"


def of_rank(values: Sequence[Any]) -> Callable[[], Any]:
    """Return a function whose result depends on the rank whose thread calls it."""
    return lambda: values[int(threading.current_thread().name)]


def on_each(size: int, action: Callable[[Group, ControlPlane], Any]) -> list[Any]:
    """Return each rank's result or error; ranks are threads, named by their numbers."""
    hub = LocalHub()
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        control, group = hub.control(), Group.world(rank, size)
        control.join(group, lambda cause: None)
        try:
            found[rank] = action(group, control)
        except CommError as error:
            found[rank] = type(error), error.message
        control.close()

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def connect(group: Group, control: ControlPlane) -> Any:
    return TRANSPORTS["shm"].connect(group, control, Options("shm", "cpu", 10.0, "127.0.0.1"))


def test_obstacle_on_one_rank_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "why_no_shm", of_rank([None, NO_CORE, None]))
    assert on_each(3, connect) == [(UnavailableError, f"rank 1: {NO_CORE}")] * 3


def test_different_builds_are_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "core_build", of_rank(["new", "new", "old"]))
    quoted = "ranks have different builds of unisono's native core: new on rank 0, new on rank 1, old on rank 2"
    assert on_each(3, connect) == [(CommError, f"{quoted}. Install the same for all")] * 3


def test_different_builds_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "core_build", of_rank(["new", "old", "new"]))
    found = on_each(3, lambda group, control: TRANSPORTS["shm"].shm_peers(group, control, 10.0))
    assert found == [((0, 2), (1,))] * 3


def test_torch_groups_of_different_builds_take_gloo() -> None:
    assert from_store._chosen({"here"}, None, ("new", "new"), ("auto", "auto")) == "shm"
    assert from_store._chosen({"here"}, None, ("new", "old"), ("auto", "auto")) == "gloo"


def test_launch_without_the_core_takes_gloo(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(api, "why_no_shm", lambda: NO_CORE)
    monkeypatch.setattr(api, "core_build", lambda: "")
    monkeypatch.setattr(api, "_run", lambda job, *rest: [job.options.backend])
    caplog.set_level("INFO", "unisono")
    assert un.launch(lambda comm: None, 2) == ["gloo"]
    assert f"no shared memory between these ranks: {NO_CORE}" in caplog.text


PROGRAM = """
import unisono as un
print(un.launch(lambda comm: comm.backend, 2, timeout=60))
try:
    un.launch(lambda comm: None, 2, "shm", timeout=60)
except un.errors.UnavailableError as error:
    print(error.message)
"""


@pytest.mark.soak
def test_processes_without_the_core() -> None:
    environment = {**os.environ, "UNISONO_NO_EXTENSIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, env=environment, capture_output=True, text=True, timeout=200
    )
    backend, error = done.stdout.splitlines()
    assert backend == "['gloo', 'gloo']"
    assert "needs unisono's native core: unset UNISONO_NO_EXTENSIONS; or use backend='gloo'" in error
