"""A control plane, and processes, that never outlive the test that uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unisono import wire
from unisono.control.client import SocketControl
from unisono.control.server import Server

# A bare package in the place of unisono: its front door imports torch, which takes seconds in each process.
_BARE = f"""
import sys, types
sys.modules["unisono"] = types.ModuleType("unisono")
sys.modules["unisono"].__path__ = [{str(Path(wire.__file__).parents[1])!r}]
"""

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
        process.communicate(timeout=30)


@pytest.fixture
def server() -> Iterator[Server]:
    """A control server whose secret is `of the tests`."""
    serving = Server(b"of the tests")
    yield serving
    serving.close()
    assert not serving._thread.is_alive()


@pytest.fixture
def client(server: Server) -> Iterator[SocketControl]:
    """A handle to it."""
    control = SocketControl(server.address, b"of the tests", 10.0)
    yield control
    control.close()
    assert not control._reader.is_alive()
