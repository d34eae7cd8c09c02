"""Ranks as processes on this host, forked from a forkserver that has already imported torch."""

from __future__ import annotations

import ast
import errno
import importlib.machinery
import io
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from unisono.control.client import SocketControl
from unisono.control.process_exit import exit_with_children, raise_failed_saves
from unisono.control.server import ControlServer
from unisono.core import clock
from unisono.core.failure import ended_by
from unisono.core.group import Group
from unisono.core.work import seconds_left
from unisono.errors import CommError
from unisono.host.processors import cores
from unisono.launcher.job import Job, run_reported
from unisono.launcher.linked_ranks import LINK, LinkedRanks
from unisono.launcher.replacement import replacement
from unisono.launcher.supervisor import END_S
from unisono.serialization.functions import dumps

__all__ = [
    "ProcessRanks",
    "WorkerSpec",
    "by_value",
    "configure_process",
    "dump",
    "flush_streams",
    "importable",
    "reseed_generators",
    "run_job",
    "run_worker",
    "share_of_cores",
    "start_process",
]
# Guards changes to the module `__main__`.
_starting = threading.Lock()


class ProcessRanks(LinkedRanks):
    """The processes of a job's ranks, and the control server at which they rendezvous.

    Raises:
        CommError: This process is a new rank that is still importing the main script, and the script called `launch`
            again.
    """

    def __init__(self, job: Job, size: int, on_failure: str, threads: int | None) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise CommError(
                "launch was called while a rank was importing your main script; put the call "
                "under if __name__ == '__main__':"
            )
        super().__init__(size, on_failure)
        self._payload = dump(job, importable(job.fn))
        self._threads = share_of_cores(threads, size)
        self._secret = secrets.token_bytes(32)
        self._server = ControlServer(self._secret)
        if on_failure == "replace":
            self.control = SocketControl(self._server.address, self._secret)
        self._processes: dict[int, BaseProcess] = {}

    def start(self, rank: int, attempt: int) -> None:
        if rank in self._processes:
            # End the rank's previous process and forget it, because its PID may be reused.
            _end([self._processes.pop(rank)], [])
            self.links.pop(rank).close()
        orders = WorkerSpec(
            rank,
            self.size,
            self._payload,
            dict(os.environ),
            self._server.address,
            self._secret,
            self._threads,
            _outputs(),
            multiprocessing.get_start_method(allow_none=True),
            attempt,
        )
        self._processes[rank], self.links[rank] = start_process(rank, run_worker, orders)
        self.running.add(rank)

    def signs(self, rank: int) -> list[Any]:
        return [self.links[rank], self._processes[rank].sentinel]

    def how(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(END_S)
        code = process.exitcode
        if code is not None and code < 0:
            return ended_by(-code)
        return (
            f"ended with exit code {code} before it could report; see its output. (A script that calls launch "
            "must do so under if __name__ == '__main__':)"
        )

    def close(self) -> None:
        """End all ranks, then close the control plane. Ranks that have reported their outcome exit by themselves."""
        _end(
            [process for rank, process in self._processes.items() if rank in self.running],
            [process for rank, process in self._processes.items() if rank not in self.running],
        )
        for link in self.links.values():
            link.close()
        # Drop the process objects now: an object's file descriptors are closed only when the object is freed.
        self._processes.clear()
        if self.control is not None:
            self.control.close()
        self._server.close()


def start_process(rank: int, target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Start a rank's process, which calls `target(*args, link)`; return the process and the other end of the link."""
    context = _context()
    own, link = context.Pipe()
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=target, args=(*args, link), name=f"unisono rank {rank}"
    )
    try:
        with link, _main_as_ranks_see_it():
            process.start()
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        raise CommError(
            f"no rank can be started: the temporary directory {tempfile.gettempdir()} has too long a name for a "
            "socket in it; set TMPDIR=/tmp"
        ) from error
    return process, own


def _end(quiet: list[BaseProcess], reported: list[BaseProcess]) -> None:
    """End all ranks. Wait for ranks that have reported, terminate all other ranks, and kill any that do not exit."""
    for process in quiet:
        process.terminate()
    deadline = clock.now() + END_S
    for process in (*quiet, *reported):
        process.join(seconds_left(deadline))
        if process.is_alive():
            process.kill()
            process.join()
        # Kill the rank's children, which are in its process group.
        if process.pid is not None:
            with suppress(AttributeError, ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _context() -> BaseContext:
    """Return a forkserver context that preloads torch. The first rank starts in 1.1 s, each further rank in 0.05 s."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # In a test run, the main script is pytest, so preload it; otherwise every rank would import it again.
    context.set_forkserver_preload([*(["pytest"] if "pytest" in sys.modules else []), "unisono.launcher.preload"])
    return context


def share_of_cores(asked: int | None, size: int) -> int:
    """Return a rank's number of threads: as requested, or OMP_NUM_THREADS if set, or an equal share of the cores."""
    if asked is not None:
        return asked
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else max(1, cores() // size)


def _outputs() -> tuple[Connection | None, ...] | None:
    """Return the caller's stdout and stderr, which may have been redirected after the forkserver started."""
    if sys.platform == "win32":
        return None
    return tuple(map(_passable, (1, 2)))


def _passable(number: int) -> Connection | None:
    """Return a copy of a descriptor as a `Connection`, which multiprocessing can pass to a child; None if closed."""
    try:
        return Connection(os.dup(number))
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None


def dump(program: Any, found: bool) -> bytes:
    """Pickle a job; pickle its function by reference if ranks can import it (`found`), and otherwise by value."""
    try:
        if found and not _is_rewritten(program.fn):
            return pickle.dumps(program)
    except (pickle.PicklingError, AttributeError, TypeError):
        pass
    try:
        return by_value(program)
    except TypeError:
        if found:
            # Ignore errors of any type in the second attempt to pickle: the first error names the object that cannot be
            # sent.
            with suppress(Exception):
                return pickle.dumps(program)
        raise


def by_value(job: Any) -> bytes:
    """Pickle the job, including everything that a fresh process could not import.

    Raises:
        TypeError: A part of the job cannot be pickled.
    """
    main = sys.modules.get("__main__")
    module = sys.modules.get(getattr(job.fn, "__module__", "") or "")
    known = module is None or module is main or (_found(module) and not _is_rewritten(job.fn))
    try:
        return dumps(job, None if known else module)
    except Exception as error:
        raise TypeError(f"{_unsendable(job)} cannot be sent to the ranks: {error}") from error


def _unsendable(job: Any) -> str:
    """Return the part of a job that cannot be pickled."""
    arguments = {f"args[{index}]": value for index, value in enumerate(job.args)}
    keywords = {f"kwargs[{name!r}]": value for name, value in job.kwargs.items()}
    for name, value in {"fn": job.fn, **arguments, **keywords}.items():
        try:
            dumps(value)
        except Exception:
            return name if name != "fn" else "fn, or a variable that it uses,"
    return "the program"


def importable(fn: Any) -> bool:
    """Return whether newly started ranks can import the function."""
    main = sys.modules.get("__main__")
    # If ranks cannot import the main module, treat no function as importable, because objects that `fn` uses or
    # receives may come from it.
    if main is None or not _is_file(main):
        return False
    module = sys.modules.get(getattr(fn, "__module__", "") or "")
    return module is not None and (_is_defined_on_import(fn, main) if module is main else _found(module))


def _is_rewritten(fn: Any) -> bool:
    """Return whether pytest has rewritten the assertions in the function's module, which ranks import unchanged."""
    return "@pytest_ar" in vars(sys.modules.get(getattr(fn, "__module__", "") or "", object))


def _is_defined_on_import(fn: Any, main: ModuleType) -> bool:
    """Return whether importing the main module defines the function; False for a function under the main guard."""
    name = getattr(fn, "__qualname__", "").partition(".")[0]
    body = ast.parse(Path(str(main.__file__)).read_bytes()).body
    always = [node for node in body if not (isinstance(node, ast.If) and "__main__" in ast.dump(node.test))]
    return any(name in (getattr(node, "name", ""), getattr(node, "id", "")) for top in always for node in ast.walk(top))


def _is_file(main: ModuleType) -> bool:
    """Return whether ranks can import the main module; False if its code was typed, piped in, or passed with -c."""
    return Path(getattr(main, "__file__", None) or "").is_file()


@contextmanager
def _main_as_ranks_see_it() -> Iterator[None]:
    """Hide the main module's `__file__` if there is no such file; otherwise, ranks would try to run "<stdin>"."""
    main = sys.modules["__main__"]
    if _is_file(main) or "__file__" not in vars(main):
        yield
        return
    with _starting:
        name = vars(main).pop("__file__")
        try:
            yield
        finally:
            main.__file__ = name


def _found(module: ModuleType) -> bool:
    """Return whether a new process with the same `sys.path` would import `module` under its name."""
    if module.__spec__ is not None and module.__spec__.origin in ("built-in", "frozen"):
        return True
    parent, _, _ = module.__name__.rpartition(".")
    if parent and not (parent in sys.modules and _found(sys.modules[parent])):
        return False
    path = sys.modules[parent].__path__ if parent else None
    spec = importlib.machinery.PathFinder.find_spec(module.__name__, path)
    return spec is not None and module.__spec__ is not None and spec.origin == module.__spec__.origin


# -- the rank --------------------------------------------------------------------------------------
@dataclass(slots=True)
class WorkerSpec:
    """Everything that the launching process passes to a rank through multiprocessing.

    Attributes:
        job: A pickled `Job`. A rank may have to import the caller's main module before it can unpickle the job.
        environment: The caller's environment, needed because the forkserver still has the environment it was started
            with.
        address, secret: Address and secret of the control plane, which runs in the caller's process.
        outputs: Copies of the caller's standard output and standard error; None for a closed stream.
        start_method: Multiprocessing start method chosen by the caller; None for the platform's default.
        attempt: Number of times this rank has been started before: 0, or a positive number for a replacement.
    """

    rank: int
    size: int
    job: bytes
    environment: dict[str, str]
    address: tuple[str, int]
    secret: bytes
    threads: int
    outputs: tuple[Connection | None, ...] | None
    start_method: str | None
    attempt: int = 0


def run_worker(orders: WorkerSpec, link: Connection) -> None:
    """Run a rank: set up the process, run the job, and send its outcome to the launching process."""
    # Ignore Ctrl-C at the terminal: the launching process handles it, and ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        # Create a process group for the rank and its children, so that they can be killed together.
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(orders.environment)
    if orders.outputs is not None:
        for number, copy in zip((1, 2), orders.outputs, strict=True):
            if copy is not None:
                os.dup2(copy.fileno(), number)
    reseed_generators()
    configure_process(orders.threads)
    # Reset the start method, so that data loader workers start as they would in the caller's process, not from the
    # forkserver.
    multiprocessing.set_start_method(orders.start_method, force=True)
    run_job(orders, link)


def reseed_generators() -> None:
    """Seed a forked process's default random generators from the system's entropy, as in a new interpreter.

    Without new seeds, dropout would use the same masks on all ranks. After a fork, Python itself reseeds its `random`
    module.
    """
    torch.default_generator.seed()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def configure_process(threads: int) -> None:
    """Set up a rank's output streams and its number of threads."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Write whole lines, so that output from several ranks does not interleave.
            stream.reconfigure(line_buffering=True, write_through=False)
    torch.set_num_threads(threads)


def run_job(orders: WorkerSpec, link: Connection) -> None:
    """Run the job, and send its outcome to the launching process."""
    LINK.set(link)

    def program() -> Any:
        job: Job = pickle.loads(orders.job)
        control = SocketControl(orders.address, orders.secret, job.options.timeout_s, on_orphan=exit_with_children)
        if orders.attempt:
            options = job.options_of(orders.rank)
            result = job.call(replacement(control, orders.rank, orders.attempt, options, job.wrap))
        else:
            result = job.run(Group.world(orders.rank, orders.size), control)
        raise_failed_saves()
        return result

    outcome = run_reported(orders.rank, program)
    flush_streams()
    link.send_bytes(outcome)


def flush_streams() -> None:
    """Flush a rank's output. Ignore errors, for example if a stream is missing or its reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
