"""Template process, from which a script's ranks are forked: it only imports torch.

The template does not start threads, draw random numbers or initialize CUDA: threads and CUDA contexts do not survive a
fork, and all ranks would inherit the same random state.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

from unisono.core.frames import READ_BYTES, FrameChannel, Kind
from unisono.host.processes import interpreter_flags
from unisono.launcher.script_rank import arrange, main

__all__ = ["fork_ranks"]


def fork_ranks(link: socket.socket, alive: int, command: list[str]) -> int | None:
    """Fork a script's ranks, and report their exits. Returns in this process and in each forked rank.

    Args:
        link: Connection to the launcher. The launcher sends each rank's environment `variables` and the file
            descriptors `stdout`, `stderr` and `report`. The launcher receives a frame with the process ID when a rank
            starts, and a frame with the exit status when a rank ends.
        alive: File descriptor of a pipe that closes when the launcher ends.
        command: A file, or "-m" and a module, followed by the script's arguments.

    Returns: In a rank, the descriptor of the file for the rank's uncaught error. The template process returns None once
    all ranks have ended.
    """
    channel = FrameChannel()
    ranks = [order.json() for order in channel.frames(partial(link.recv, READ_BYTES), Kind.ORDER)]
    arrange(command)
    obstacle = _load()
    if obstacle is not None:
        sys.stderr.write(f"unisono run: each rank starts a Python of its own: {obstacle}\n")
        sys.stderr.flush()
    started = {}
    for rank, order in enumerate(ranks):
        if select.select([alive], [], [], 0)[0]:
            # The launcher has ended, so do not start more ranks.
            return None
        if obstacle is not None:
            process = _spawn(order, ranks, alive, command)
        elif not (process := os.fork()):
            link.close()
            _become_rank(order, ranks)
            return int(order["report"])
        started[process] = rank
        link.sendall(channel.encode_json(Kind.STARTED, process, rank))
    for descriptor in (order[name] for order in ranks for name in ("stdout", "stderr", "report")):
        os.close(descriptor)
    while started:
        process, status = os.wait()
        if process in started:
            link.sendall(channel.encode_json(Kind.ENDED, os.waitstatus_to_exitcode(status), started.pop(process)))
    return None


def _load() -> str | None:
    """Import torch and this library; return why ranks cannot be forked from this process, or None."""
    # While torch is being imported, there is nothing to clean up, so let Ctrl-C kill this process without a traceback.
    interrupts = signal.getsignal(signal.SIGINT)
    if interrupts is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        importlib.import_module("unisono.launcher.preload")
    except Exception as error:
        return f"the import of torch failed ({type(error).__name__}: {error})"
    finally:
        # Ranks inherit the signal mask, and each rank unblocks SIGINT when it is ready to handle it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, interrupts)
    threads = len([*Path("/proc/self/task").iterdir()]) - 1
    if threads:
        return f"the import of torch started {threads} {'thread' if threads == 1 else 'threads'}"
    if sys.modules["torch"].cuda.is_initialized():
        return "the import of torch initialized CUDA"
    if _is_observed():
        return "a tracer or profiler of Python is active"
    return None


def _is_observed() -> bool:
    """Return whether a debugger, profiler or coverage tool is active, which would not notice when forked ranks end."""
    monitoring = getattr(sys, "monitoring", None)
    tools = () if monitoring is None else (monitoring.get_tool(number) for number in range(6))
    return tracemalloc.is_tracing() or any((sys.gettrace(), sys.getprofile(), *tools))


def _spawn(order: dict[str, Any], ranks: list[dict[str, Any]], alive: int, command: list[str]) -> int:
    """Start a rank as a new interpreter, and return its process ID."""
    words = [
        sys.executable,
        *interpreter_flags(),
        "-m",
        "unisono.launcher.script_rank",
        str(alive),
        str(order["report"]),
        *command,
    ]
    outputs = [(os.POSIX_SPAWN_DUP2, order[name], number) for number, name in ((1, "stdout"), (2, "stderr"))]
    closed = [(os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _not_kept(order, ranks)]
    return os.posix_spawn(
        words[0], words, {**os.environ, **order["variables"]}, file_actions=[*outputs, *closed], setsid=True
    )


def _become_rank(order: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Make this forked process look like a newly started interpreter."""
    # Start a new session for the rank and its children, so that they can be killed together, and so that Ctrl-C at the
    # terminal reaches only the launcher.
    os.setsid()
    os.dup2(order["stdout"], 1)
    os.dup2(order["stderr"], 2)
    for descriptor in _not_kept(order, ranks):
        os.close(descriptor)
    os.environ.update(order["variables"])
    importlib.import_module("unisono.launcher.processes").reseed_generators()
    multiprocessing.current_process().authkey = os.urandom(32)


def _not_kept(order: dict[str, Any], ranks: list[dict[str, Any]]) -> list[int]:
    """Return the descriptors that a rank must close, so that the launcher sees the end of other ranks' output."""
    names = ("stdout", "stderr", "report")
    return [other[name] for other in ranks for name in names if name != "report" or other is not order]


def _main(link: int, alive: int, command: list[str]) -> None:
    os.set_inheritable(link, False)
    with socket.socket(fileno=link) as connection:
        report = fork_ranks(connection, alive, command)
    if report is not None:
        main(alive, report, command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
