"""One rank of `unisono run`: runs a script as `__main__`, and ends when the launcher has gone."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from unisono.control.process_exit import raise_failed_saves
from unisono.diagnostics.tracebacks import show_errors
from unisono.host import numa

__all__ = ["main"]


def main(alive: int, command: list[str]) -> None:
    """Run the script.

    Args:
        alive: File descriptor of a pipe that ends with the launcher.
        command: A file or "-m" and a module, then the script's arguments.
    """
    numa.bind()
    threading.Thread(target=_end_with_launcher, args=(alive,), daemon=True).start()
    show_errors(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise
    raise_failed_saves()


def _end_with_launcher(alive: int) -> None:
    os.read(alive, 1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
