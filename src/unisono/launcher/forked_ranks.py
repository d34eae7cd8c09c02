"""A script's ranks, forked from a template process that has already imported torch."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from unisono.core.frames import READ_BYTES, Frame, FrameChannel, Kind
from unisono.host.processes import interpreter_flags
from unisono.launcher.supervisor import END_S

__all__ = ["StartedRank", "fork_ranks", "sets_environment"]

_CHANGES = ("setdefault", "update", "pop", "clear")
_SETTERS = ("putenv", "unsetenv", "load_dotenv")


@dataclass(slots=True)
class StartedRank:
    """A rank's process, or a rank that the template process will fork.

    Attributes:
        pid: Process ID of the rank or, before the fork, of the template, which gets the rank's signals until then; both
            are session leaders.
        stdout, stderr: Pipes with the rank's output.
        status: The exit status; negative if a signal killed the process, None while it runs.
    """

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    status: int | None = None


def sets_environment(command: Sequence[str]) -> bool:
    """Return whether a script's source sets an environment variable; True if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            # Ignore warnings here: the ranks compile the script again, and then print the same warnings.
            warnings.simplefilter("ignore")
            nodes = [*ast.walk(ast.parse(_text(command)))]
    except (SyntaxError, ValueError):
        return True
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    changed: list[ast.expr] = [
        node.value for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    ]
    changed += [func.value for func in called if isinstance(func, ast.Attribute) and func.attr in _CHANGES]
    return "environ" in map(_name, changed) or any(_name(func) in _SETTERS for func in called)


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", "") or getattr(node, "id", ""))


def _text(command: Sequence[str]) -> bytes:
    """Return the source of a command's module or file. Raises `ValueError` if no source is found."""
    if command[0] == "-m":
        places = [Path(folder, command[1].replace(".", "/")) for folder in (str(Path.cwd()), *sys.path[1:])]
        files = [file for place in places for file in (place.with_suffix(".py"), place / "__main__.py")]
    else:
        files = [Path(command[0], "__main__.py"), Path(command[0])]
    found = next((file for file in files if file.is_file() and file.suffix != ".pyc"), None)
    if found is None:
        raise ValueError(f"{' '.join(command[:2])} has no text that can be read")
    return found.read_bytes()


def fork_ranks(
    command: Sequence[str],
    environments: Sequence[dict[str, str]],
    alive: int,
    reports: Sequence[int],
    on_end: Callable[[int, int], object],
) -> tuple[list[StartedRank], IO[bytes], Callable[[], None]]:
    """Start the template process, which forks a script's ranks.

    Returns immediately. No rank is forked until the returned function runs: it sends the template its orders. The
    template then forks the ranks when it has imported torch, or starts separate interpreters if ranks cannot be forked.

    Args:
        command: A file, or "-m" and a module, followed by the script's arguments.
        environments: Environment variables of each rank.
        alive: File descriptor of a pipe that closes when this process ends.
        reports: For each rank, the descriptor of the file to which it reports an uncaught error.
        on_end: Called with the index and exit status of each rank that ends, after the rank's `status` is set.

    Returns: The ranks, the template's own output, and a function that has the ranks forked, notes their ends, and
    returns when all ranks have ended; the caller must run it in a thread.
    """
    first = environments[0]
    shared = {name: value for name, value in first.items() if all(each.get(name) == value for each in environments)}
    own, link = socket.socketpair()
    outputs = [(os.pipe(), os.pipe()) for _ in environments]
    orders = [
        {
            "variables": {name: value for name, value in each.items() if name not in shared},
            "stdout": out,
            "stderr": err,
            "report": report,
        }
        for each, ((_, out), (_, err)), report in zip(environments, outputs, reports, strict=True)
    ]
    written = [writer for pair in outputs for _, writer in pair]
    template = subprocess.Popen(
        # Pass the script and its arguments on the command line, so that `ps` shows them.
        [
            sys.executable,
            *interpreter_flags(),
            "-m",
            "unisono.launcher.template",
            str(link.fileno()),
            str(alive),
            *command,
        ],
        env=shared,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(link.fileno(), alive, *reports, *written),
        start_new_session=True,
    )
    link.close()
    for writer in written:
        os.close(writer)
    ranks = [StartedRank(template.pid, os.fdopen(out, "rb"), os.fdopen(err, "rb")) for (out, _), (err, _) in outputs]

    def follow() -> None:
        # However this loop ends, even with a truncated frame, the code below kills the template and all ranks left.
        with own, suppress(OSError, ValueError):
            channel = FrameChannel()
            own.sendall(b"".join(channel.encode_json(Kind.ORDER, order) for order in orders))
            own.shutdown(socket.SHUT_WR)
            for frame in channel.frames(partial(own.recv, READ_BYTES), Kind.STARTED, Kind.ENDED):
                _on_frame(ranks, frame, on_end)
                if all(rank.status is not None for rank in ranks):
                    break
        try:
            status = template.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(template.pid, signal.SIGKILL)
            status = template.wait()
        _end_left(ranks, status, on_end)

    assert template.stdout is not None
    return ranks, template.stdout, follow


def _on_frame(ranks: list[StartedRank], frame: Frame, on_end: Callable[[int, int], object]) -> None:
    match frame.kind, frame.json():
        case Kind.STARTED, int(process) if frame.number in range(len(ranks)):
            ranks[frame.number].pid = process
        case Kind.ENDED, int(status) if frame.number in range(len(ranks)):
            ranks[frame.number].status = status
            on_end(frame.number, status)
        case _:
            raise ValueError(f"no rank {frame.number} can have {frame.kind.name.lower()}")


def _end_left(ranks: list[StartedRank], status: int, on_end: Callable[[int, int], object]) -> None:
    """Kill the ranks that outlived the template process, because nothing else would report their end."""
    for number, rank in enumerate(ranks):
        if rank.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.status = status or 1
            on_end(number, rank.status)
