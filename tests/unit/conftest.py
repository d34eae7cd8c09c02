"""A control plane, and processes, that never outlive the test that uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unisono import serialization
from unisono.bootstrap import rendezvous
from unisono.control import LocalHub
from unisono.control.client import SocketControl
from unisono.control.client_base import ControlClient
from unisono.control.server import ControlServer

# An empty package instead of unisono: its __init__ imports torch, which takes seconds in each process.
_BARE = f"""
import sys, types
sys.modules["unisono"] = types.ModuleType("unisono")
sys.modules["unisono"].__path__ = [{str(Path(serialization.__file__).parents[1])!r}]
"""

Make = Callable[[], ControlClient]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python on some lines, with arguments and changes to the environment (None removes a variable)."""
    started: list[subprocess.Popen[str]] = []

    def one(code: str, *arguments: object, env: dict[str, str | None] | None = None) -> subprocess.Popen[str]:
        changed = {**os.environ, **(env or {})}
        process = subprocess.Popen(
            [sys.executable, "-c", _BARE + textwrap.dedent(code), *map(str, arguments)],
            env={name: value for name, value in changed.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate(timeout=300)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    """A control server whose secret is `of the tests`."""
    before = set(threading.enumerate())
    serving = ControlServer(b"of the tests")
    own = set(threading.enumerate()) - before
    yield serving
    serving.close()
    assert own.isdisjoint(threading.enumerate())


@pytest.fixture
def client(server: ControlServer) -> Iterator[SocketControl]:
    """A handle to it."""
    before = set(threading.enumerate())
    control = SocketControl(server.address, b"of the tests", 10.0)
    own = set(threading.enumerate()) - before
    yield control
    control.close()
    assert own.isdisjoint(threading.enumerate())


@pytest.fixture(params=["local", "socket"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """One more rank's handle; all of a test lead to the same control plane."""
    made: list[ControlClient] = []
    before = set(threading.enumerate())
    hub, server = (LocalHub(), None) if request.param == "local" else (None, ControlServer(b"of the tests"))
    own = set(threading.enumerate()) - before

    def one() -> ControlClient:
        made.append(SocketControl(server.address, b"of the tests", 10.0) if server is not None else hub.control())
        return made[-1]

    yield one
    for control in made:
        control.close()
    if server is not None:
        server.close()
        assert own.isdisjoint(threading.enumerate())


@pytest.fixture
def nobody_started_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No ranks in the environment, an own secret, and no server that outlives a test."""
    others = [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI"))]
    for name in (*VARIABLES, "UNISONO_SECRET", *others):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    leases: dict[tuple[int, str], rendezvous.Lease] = {}
    monkeypatch.setattr(rendezvous, "_leases", leases)
    yield
    for lease in list(leases.values()):
        lease.server.close()
