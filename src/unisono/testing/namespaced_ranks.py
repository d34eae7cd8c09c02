"""Ranks on the hosts of a `Network`: processes of `launch`'s forkserver that first enter their host's namespace."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch

from unisono.launcher.api import init
from unisono.testing.network import Network, enter

__all__ = ["HostRanks", "live", "send_signal"]

_ports = itertools.count(29600)
_TIMEOUT_S = 10.0


class HostRanks:
    """Ranks that each run `program(comm, *args)` on a communicator that `init` made from their environment.

    Args:
        network: The hosts.
        per_host: Number of ranks of each host, such as (2, 2).
        program: The program of every rank; importable.
        args: Passed to the program.
        backend: Backend for `init`.
        options: Returns further options of `init` for a rank number; `timeout` defaults to 10 s.

    Example:
        with Network(2) as network, HostRanks(network, (2, 2), program) as ranks:
            print(ranks.results())
    """

    def __init__(
        self,
        network: Network,
        per_host: Sequence[int],
        program: Callable[..., Any],
        *args: Any,
        backend: str = "auto",
        options: Callable[[int], dict[str, Any]] = lambda rank: {},
    ) -> None:
        hosts = [host for host, count in enumerate(per_host) for _ in range(count)]
        place = {
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": str(next(_ports)),
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["unisono.launcher.preload", *(["pytest"] if "pytest" in sys.modules else [])])
        self.processes: list[BaseProcess] = []
        self._readers: list[Connection] = []
        for rank, host in enumerate(hosts):
            reader, writer = context.Pipe(duplex=False)
            given = {"timeout": _TIMEOUT_S, **options(rank)}
            environment = {**place, "RANK": str(rank)}
            orders = (network.name(host), environment, backend, given, program, args, writer)
            process = context.Process(target=live, args=orders, name=f"unisono rank {rank}")
            process.start()
            writer.close()
            self.processes.append(process)
            self._readers.append(reader)

    def results(self, within_s: float = 60.0, ranks: Iterable[int] | None = None) -> list[Any]:
        """Return the result of each of these ranks (all if None), or its error; None for a killed rank."""
        found: list[Any] = []
        for rank in range(len(self._readers)) if ranks is None else ranks:
            reader = self._readers[rank]
            assert reader.poll(within_s), f"rank {rank} has not ended within {within_s} s"
            try:
                found.append(pickle.loads(reader.recv_bytes()))
            except EOFError:
                found.append(None)
        return found

    def wait_for_word(self, within_s: float = 60.0) -> None:
        """Wait until every rank has called `send_signal`."""
        for rank, reader in enumerate(self._readers):
            assert reader.poll(within_s), f"rank {rank} sent no signal within {within_s} s"
            assert reader.recv_bytes() == b"word", f"rank {rank} has ended early"

    def kill(self, *ranks: int) -> None:
        """Kill these ranks by SIGKILL."""
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for reader in self._readers:
            reader.close()


_writers: list[Connection] = []


def send_signal() -> None:
    """Notify the test that this rank has reached this point."""
    _writers[0].send_bytes(b"word")


def live(
    namespace: str,
    place: dict[str, str],
    backend: str,
    options: dict[str, Any],
    program: Callable[..., Any],
    args: tuple[Any, ...],
    writer: Connection,
) -> None:
    """Run one rank."""
    enter(namespace)
    os.environ.update(place)
    torch.set_num_threads(1)
    _writers.append(writer)
    try:
        with init(backend, **options) as comm:
            result = program(comm, *args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        result = error
    writer.send_bytes(pickle.dumps(result))
