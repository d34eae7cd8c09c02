"""A rank on an executor's worker: it joins the other ranks, runs the program, and restores the worker's state."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from unisono.bootstrap.rendezvous import RankClaim, Rendezvous, confirm
from unisono.communicator import Communicator
from unisono.control.client import SocketControl
from unisono.control.process_exit import exit_with_children, raise_failed_saves
from unisono.core import clock
from unisono.core.transport import HEARTBEAT_LEAST_S, Options, Transport
from unisono.errors import AbortedError, CommError, PeerLostError
from unisono.launcher.job import run_reported
from unisono.launcher.processes import flush_streams, share_of_cores
from unisono.launcher.replacement import replacement

__all__ = ["JOB", "OVER", "Program", "host_of", "run_rank", "started"]

JOB = "launch"
"""Prefix of the ranks' group names on the control plane."""
OVER = "over"
"""Control-plane key that is set when ranks must not start any more."""
_REACH_WITHIN_S = 10.0


@dataclass(slots=True)
class Program:
    """The program of every rank.

    Attributes:
        connect: Function that creates the communicator of all ranks after the rendezvous.
        options, wrap: Options of a replacement rank's communicator, and the wrapper around its transport. `options`
            also has the backend that was passed to `launch`, every rank's heartbeat, and the timeout, within which all
            ranks must arrive.
        threads: Number of torch threads per rank; if None, `share_of_cores` uses OMP_NUM_THREADS, or divides a host's
            cores among its ranks.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    connect: Callable[[Rendezvous], Communicator]
    options: Options
    wrap: Callable[[Transport], Transport] | None
    threads: int | None


def started(rank: int, attempt: int) -> str:
    """Return the control-plane key that counts the attempts to start a rank."""
    return f"started/{rank}/{attempt}"


def host_of(rank: int) -> str:
    """Return the control-plane key for the address of a rank's host."""
    return f"host/{rank}"


# This is a module-level variable, because a rank changes state that is global to the process: the environment, signal
# handlers and torch's default group.
_ranks: dict[int, object] = {}


def run_rank(
    rank: int,
    attempt: int,
    size: int,
    payload: bytes,
    address: tuple[str, int],
    secret: bytes,
    timeout_s: float,
    owned: bool,
) -> bytes:
    """Run a rank on a worker of the executor, and return its pickled outcome.

    Args:
        rank, size: This rank, and the number of ranks.
        attempt: Number of times this rank has been started before: 0, or a positive number for a replacement.
        payload: The pickled `Program`.
        address, secret: Address and secret of the control plane, which runs in the process that called `launch`.
        timeout_s: The program's timeout, which is passed separately because unpickling the payload may fail here.
        owned: Whether the process was started for this launch, and must exit if the caller exits, regardless of what
            the program is doing.
    """
    with ExitStack() as leaving:

        def program() -> Any:
            with _only_rank_here(rank), _borrowed_process():
                here = _address_here(address)
                orphaned = exit_with_children if owned else None
                # Use a control-plane handle separate from the communicator's, because the program may close the
                # communicator long before the program ends.
                watch = SocketControl(address, secret, timeout_s, orphaned, _REACH_WITHIN_S, rank=rank)
                leaving.callback(_leave, watch, rank, attempt)
                _check_in(watch, rank, attempt, size)
                watch.set(host_of(rank), here.encode())
                return _run_rank(watch, rank, attempt, size, payload, secret)

        outcome = run_reported(rank, program)
        # Collect garbage now: hooks on a model form reference cycles, which keep the communicator's file descriptors
        # open until the cycles are collected.
        gc.collect()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        # Exit, because the caller was killed, and this worker of its process pool would wait forever for its next task.
        exit_with_children()
    return outcome


@contextmanager
def _only_rank_here(rank: int) -> Iterator[None]:
    here = object()
    if _ranks.setdefault(os.getpid(), here) is not here:
        raise CommError(
            f"rank {rank} was started in process {os.getpid()}, which runs another rank; each rank needs a process of "
            "its own: ProcessPoolExecutor, not ThreadPoolExecutor; LocalCluster(threads_per_worker=1)"
        )
    try:
        yield
    finally:
        del _ranks[os.getpid()]


def _run_rank(watch: SocketControl, rank: int, attempt: int, size: int, payload: bytes, secret: bytes) -> Any:
    program: Program = pickle.loads(payload)
    options = program.options
    watch.set_heartbeat(options.heartbeat_s or options.timeout_s + HEARTBEAT_LEAST_S)
    control = SocketControl(watch.address, secret, options.timeout_s, None, _REACH_WITHIN_S, rank=rank)
    with _communicator(program, control, rank, attempt, size) as comm:
        result = program.fn(comm, *program.args, **program.kwargs)
    raise_failed_saves()
    return result


def _communicator(program: Program, control: SocketControl, rank: int, attempt: int, size: int) -> Communicator:
    """Return the communicator of all ranks, or, for a replacement, one that contains only this rank."""

    def share_cores(comm: Communicator) -> None:
        here_too = next(len(ranks) for ranks in comm.hosts if comm.rank in ranks)
        torch.set_num_threads(share_of_cores(program.threads, here_too))

    if attempt:
        torch.set_num_threads(share_of_cores(program.threads, size))
        return replacement(control, rank, attempt, program.options, program.wrap, share_cores)
    claim = RankClaim(rank, size, None, clock.now() + program.options.timeout_s, "launch on an executor", JOB)
    comm = program.connect(confirm(claim, control))
    share_cores(comm)
    return comm


def _address_here(address: tuple[str, int]) -> str:
    """Return the address that this host uses to reach the server.

    Raises:
        AbortedError: The server has shut down, which happens if an executor reruns a task after `launch` has ended.
    """
    try:
        with socket.create_connection(address, _REACH_WITHIN_S) as connection:
            return str(connection.getsockname()[0])
    except ConnectionRefusedError:
        raise AbortedError(
            f"launch has ended before this rank has started: nothing listens at {address[0]}:{address[1]}. If it has "
            "not ended, set UNISONO_INTERFACE there to the network interface that workers can reach"
        ) from None
    except OSError as error:
        raise CommError(
            f"a worker cannot reach the process that called launch at {address[0]}:{address[1]} ({error}); set "
            "UNISONO_INTERFACE there to the network interface that workers can reach"
        ) from error


def _check_in(control: SocketControl, rank: int, attempt: int, size: int) -> None:
    """Count this start of the rank, and refuse a second one: executors rerun the tasks of a worker that died."""
    control.identify(f"{rank}/{attempt}/0")
    if control.add(started(rank, attempt), 1) > 1:
        raise PeerLostError(
            f"rank {rank} of {size} was lost: its worker has ended, and a second start is refused", peer=rank
        )
    if control.check([OVER]):
        raise AbortedError("launch has ended before this rank has started")


def _leave(watch: SocketControl, rank: int, attempt: int) -> None:
    """Report that the rank has ended, since the engine may lose its outcome: retired Dask workers deliver nothing."""
    with suppress(CommError):
        watch.identify(f"{rank}/{attempt}/1")
    watch.close()


@contextmanager
def _borrowed_process() -> Iterator[None]:
    """On exit, restore the process's environment, signal handlers, torch threads and default process group."""
    environment = dict(os.environ)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if main else {}
    threads = torch.get_num_threads()
    distributed = torch.distributed if torch.distributed.is_available() else None
    had_group = distributed is not None and distributed.is_initialized()
    try:
        yield
    finally:
        if distributed is not None and distributed.is_initialized() and not had_group:
            distributed.destroy_process_group()
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        flush_streams()
