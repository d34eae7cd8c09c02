"""Ranks of several checkouts of unisono that take turns in one run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unisono.testing import Network

__all__ = ["Checkout", "Collective", "Repeated"]

_RANKS = Path(__file__).with_name("_checkout_ranks.py")
_LOOK_EVERY_S = 0.2
_START_S = 60.0
_SAMPLE_S = 120.0


@dataclass(frozen=True)
class Collective:
    """Calls of a collective that make one sample.

    Attributes:
        nbytes, dtype: Size of each tensor, and torch's name of its dtype.
        registered: Whether tensors are allocated by `Communicator.empty`.
        tensors: Number of tensors, used in turn.
        calls: Number of calls per sample.
        name: Name of the collective; "message" sends from rank 0 to rank 1 and back.
    """

    nbytes: int
    dtype: str = "float32"
    registered: bool = False
    tensors: int = 64
    calls: int = 64
    name: str = "all_reduce"
    program: str = field(default="collective", init=False)


@dataclass(frozen=True)
class Repeated:
    """Repetitions of a program of `_checkout_ranks.py` that make one sample.

    Attributes:
        program: Its name, such as "averager".
        calls: Number of repetitions per sample.
    """

    program: str
    calls: int


class Checkout:
    """Ranks that run the unisono of another folder, and sleep between samples.

    Args:
        source: The folder to import unisono from, such as `src` of a git worktree; its native parts are built.
        ranks, backend: As for `unisono.launch`. Without a backend, a single process that is no rank runs the programs.
        network: Hosts to spread the ranks over evenly, instead of launching them on this one.

    Raises:
        RuntimeError: The ranks ended, or do not answer; their output states the cause.

    Example:
        with Checkout(Path("src"), 2) as new, Checkout(Path("../old/src"), 2) as old:
            interleave({"new": new.sample(case), "old": old.sample(case)}, seconds=1.0)
    """

    def __init__(self, source: Path, ranks: int, backend: str = "shm", network: Network | None = None) -> None:
        self._source = source.resolve()
        if not (self._source / "unisono").is_dir():
            raise ValueError(f"there is no unisono in {source}; pass the src folder of a checkout")
        self._stack = ExitStack()
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-bench-")))
            self._links = self._start(folder / "ranks", ranks, backend, network)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, address: Path, ranks: int, backend: str, network: Network | None) -> list[Any]:
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(address))
        listener.listen(ranks)
        # Without -P, modules of this folder would shadow others of the same name.
        command = [sys.executable, "-P", str(_RANKS), str(address), str(ranks), backend]
        environment = os.environ | {"PYTHONPATH": str(self._source)}
        if network is None:
            processes = [subprocess.Popen(command, env=environment)]
        else:
            hosts = len(network.addresses)
            environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": network.addresses[0], "MASTER_PORT": _free_port()}
            processes = [
                subprocess.Popen(
                    network.command(rank * hosts // ranks, *command), env=environment | {"RANK": str(rank)}
                )
                for rank in range(ranks)
            ]
        for process in processes:
            self._stack.callback(_end, process)
        count = ranks if backend else 1
        accepted = [self._stack.enter_context(self._accept(listener, processes)) for _ in range(count)]
        links = [self._stack.enter_context(connection.makefile("rw")) for connection in accepted]
        imported = {Path(self._answer(link)) for link in links}
        if imported != {self._source / "unisono" / "__init__.py"}:
            raise RuntimeError(f"the ranks of {self._source} imported {', '.join(map(str, imported))}")
        return links

    def _accept(self, listener: socket.socket, processes: list[subprocess.Popen[bytes]]) -> socket.socket:
        listener.settimeout(_LOOK_EVERY_S)
        deadline = time.monotonic() + _START_S
        while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection = listener.accept()[0]
                connection.settimeout(_SAMPLE_S)
                return connection
        raise RuntimeError(f"the ranks of {self._source} did not start; see their output")

    def sample(self, case: Collective | Repeated) -> Callable[[], float]:
        """Return a sample for `interleave`: the mean seconds of a call or repetition on the slowest rank."""

        def take() -> float:
            for link in self._links:
                link.write(json.dumps(asdict(case)) + "\n")
                link.flush()
            return max(float(self._answer(link)) for link in self._links)

        return take

    def _answer(self, link: Any) -> Any:
        line = link.readline()
        if not line:
            raise RuntimeError(f"a rank of {self._source} ended; see its output")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _free_port() -> str:
    """Return a port that is free on this host; nothing else listens on the hosts of a `Network`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the launching process; its ranks end when their connections close."""
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
