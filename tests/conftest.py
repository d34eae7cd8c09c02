"""Shared settings of all tests: one thread per rank, and the effort of Hypothesis."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

# The same examples every time in `make test`, so that what passed passes again; new ones in `make soak`.
settings.register_profile("test", deadline=None, derandomize=True, max_examples=8)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=500)
settings.load_profile("test")


# The first optimizer of a process imports torch's compiler, as long as torch itself takes. Ranks find it there.
_FORKSERVER = multiprocessing.get_context("forkserver")
_preload = _FORKSERVER.set_forkserver_preload
_FORKSERVER.set_forkserver_preload = lambda names: _preload(["torch._dynamo", *names])


def pytest_configure(config: pytest.Config) -> None:
    """Close a worker's pipe to the process that hands out the tests in children that the worker forks.

    Otherwise a child that hangs keeps the pipe open after its worker has exited because of pytest's timeout, and the
    run waits forever.
    """
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            os.register_at_fork(after_in_child=partial(_replace_with_null, plugin.channel.gateway._io))


def _replace_with_null(pipe: Any) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for file in (pipe.infile, pipe.outfile):
        os.dup2(null, file.fileno())
    os.close(null)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first what shares a preparation of seconds: jobs under mpirun, and the trees of all source files.

    Each worker begins with a part of the list, and takes over from the end of another's. So one worker runs these.
    """
    items.sort(key=lambda item: not re.search("(^|[^a-z])mpi([^a-z]|$)|tests/house/", item.nodeid))


@pytest.fixture(autouse=True, scope="session")
def compute_in_one_thread() -> None:
    """As each of several ranks should. The process that hands out the tests to workers does without torch."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def freeze_what_is_there() -> None:
    """Let collections visit what a module's own tests make: tests and compilers would take 0.2 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ports() -> Iterator[Iterator[int]]:
    """Free ports, each another one, that nobody else gets while the test runs."""
    with ExitStack() as held:

        def free() -> Iterator[int]:
            while True:
                # A bound socket keeps the port from everybody who asks for any. Who asks for this port may listen there
                # all the same, because both allow it (SO_REUSEADDR) and this socket does not listen.
                holder = held.enter_context(socket.socket())
                holder.bind(("127.0.0.1", 0))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                yield holder.getsockname()[1]

        yield free()


@pytest.fixture
def port(ports: Iterator[int]) -> int:
    return next(ports)
