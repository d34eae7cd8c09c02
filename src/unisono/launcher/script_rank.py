"""One rank of `unisono run`: runs a script as `__main__`, and exits when the launcher ends."""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import threading
import types
import zipfile
from pathlib import Path

from unisono.control.process_exit import end_at_once, exit_with_children, raise_failed_saves
from unisono.diagnostics.tracebacks import show_errors
from unisono.host import processors

__all__ = ["arrange", "main", "run_as_main"]


def main(alive: int, report: int, command: list[str]) -> None:
    """Run the script.

    Args:
        alive: File descriptor of a pipe that closes when the launcher ends.
        report: Descriptor of the file to which an uncaught error is written.
        command: A file, or "-m" and a module, followed by the script's arguments.
    """
    processors.bind()
    for descriptor in (alive, report):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_launcher, args=(alive,), daemon=True).start()
    show_errors(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), report)
    end_at_once()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        run_as_main(command)
    except SystemExit as leaving:
        if leaving.code:
            raise
    raise_failed_saves()


def arrange(command: list[str]) -> None:
    """Set `sys.argv` and `sys.path` as Python does for a script, before any of the script's imports."""
    if command[0] == "-m":
        sys.argv = command[1:]
        _search_first(str(Path.cwd()))
        return
    sys.argv = command
    path = _absolute(command[0])
    _search_first(path if _is_package(path) else os.path.dirname(os.path.realpath(path)))


def run_as_main(command: list[str]) -> None:
    """Run a module, a file, or a folder or zip archive that contains `__main__.py`, as Python does."""
    arrange(command)
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    path = _absolute(command[0])
    if _is_package(path):
        runpy.run_path(command[0], run_name="__main__")
        return
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), command[0], "exec", dont_inherit=True)
    exec(code, vars(module))


def _absolute(path: str) -> str:
    # Like Python, resolve neither symbolic links nor `.` and `..`.
    return path if Path(path).is_absolute() else f"{Path.cwd()}/{path}"


def _is_package(path: str) -> bool:
    return Path(path).is_dir() or zipfile.is_zipfile(path) or path.endswith(".pyc")


def _search_first(folder: str) -> None:
    # With -P or -I, `sys.path` has no entry for the script's folder, so there is nothing to replace.
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _end_with_launcher(alive: int) -> None:
    os.read(alive, 1)
    exit_with_children()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
