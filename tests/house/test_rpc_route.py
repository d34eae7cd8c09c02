"""Functions of ours that a remote call runs on the caller's side, and the files that they are in."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

import unisono as un
from unisono.host.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="no compiler was here when unisono was installed")

OURS = str(Path(un.__file__).parent)
MOST, MOST_FILES = 35, 9
CALLS = 40

Route = list[tuple[str, str, str]]


@un.rpc.expose
def ping() -> None:
    """Return nothing: each number among arguments and results adds one function, and one file."""


def routes(comm: un.Communicator) -> list[Route]:
    """Thread, file and name of each function that rank 0 runs, in each of some warm calls of rank 1."""
    found: list[Route] = []
    polls: dict[int, int] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code, here = frame.f_code, threading.current_thread()
        if not found or not code.co_filename.startswith(OURS):
            return
        polling = code.co_qualname.endswith("Mailbox.poll")
        if event == "call":
            if polling:
                polls[here.ident or 0] = len(found[-1])
            found[-1].append((here.name, code.co_filename, code.co_qualname))
        elif event == "return" and polling and argument == []:
            # A poll that finds nothing is repeated until the answer is there: only the one that finds it counts.
            del found[-1][polls[here.ident or 0] :]

    # Also of the receiving thread, which `init` starts.
    threading.setprofile(note if comm.rank == 0 else None)
    un.rpc.init(comm)
    un.rpc.rpc_sync(1 - comm.rank, ping)
    comm.barrier()
    taken: list[Route] = []
    for _ in range(CALLS if comm.rank == 0 else 0):
        found.append([])
        sys.setprofile(note)
        try:
            answer = un.rpc.rpc_sync(1, ping)
        finally:
            sys.setprofile(None)
        taken.append(found.pop())
        assert answer is None
    threading.setprofile(None)
    un.rpc.shutdown()
    return taken


def files(route: Route) -> set[str]:
    return {file for _, file, _ in route}


def shortest() -> Route:
    """Route of the call through the fewest files: a late answer, as on a busy machine, wakes another thread."""
    return min(un.launch(routes, 2, "shm", timeout=60)[0], key=lambda route: (len(files(route)), len(route)))


def test_a_remote_call_runs_few_functions() -> None:
    route = shortest()
    listed = "\n".join(f"{thread}: {Path(file).name} {name}" for thread, file, name in route)
    assert len(route) <= MOST, f"{len(route)} functions:\n{listed}"
    # A peer that sleeps, as on a busy machine, is woken by a function in one more file.
    woken = any(name == "futex_wake" for _, _, name in route)
    assert len(files(route)) <= MOST_FILES + woken, listed


if __name__ == "__main__":
    called = shortest()
    for where, path, function in called:
        print(f"{where:24} {Path(path).relative_to(OURS)!s:32} {function}")
    print(len(called), "functions in", len(files(called)), "files")
