"""A script and where its ranks run; and what the processes that start them report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from unisono.host import processors
from unisono.host.processors import cores
from unisono.launcher.forked_ranks import why_plain

__all__ = ["Events", "Report", "ScriptJob"]

Report = dict[str, Any]
"""Report of a rank on its uncaught error: `kind`, `time`, and its `text` and `brief` form."""


class Events(Protocol):
    """Callbacks for what ranks do while they run, called in several threads."""

    def output(self, rank: int | None, stream: int, data: bytes) -> None:
        """Take what a rank printed to stream 1 or 2; None is the process that forks ranks. May raise `OSError`."""
        ...

    def ended(self, rank: int, status: int, report: Report | None) -> None:
        """Take the exit status of a rank, negative if a signal ended it, and what it wrote about its error.

        Must not raise: other ranks' ends come by the same thread.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A script, and its ranks on one host.

    Attributes:
        command: Arguments of Python: a file or "-m" and a module, then the script's own arguments.
        ranks: Number of ranks on this host.
        host: Index of this host among all hosts.
        before: Number of ranks on the hosts before it.
        size: Number of ranks on all hosts; those of this one if None.
        address: Address of the first host.
        port: Where rank 0 listens, for torch too at the port after it; free ports if None.
        backend, heartbeat_s: What `init` uses where a program passes none; None for its own choice.
        binding: Which processors a rank may use; see `unisono.host.processors.placement`.
        prefix: Whether each line of output begins with its rank.
        to_stderr: Whether the ranks' standard output goes to standard error too.
        grace_s: Seconds in which ranks that were asked to end may save and leave.
        stdin: The rank on this host that reads standard input.
        secret: By which ranks authenticate each other; that of the environment or of the user if None.
        start: "fork" forks the ranks from one process that has imported torch, "plain" starts a Python for each;
            "auto" forks where there are more ranks than cores, and the script shows no objection.
    """

    command: Sequence[str]
    ranks: int
    host: int = 0
    before: int = 0
    size: int | None = None
    address: str = "127.0.0.1"
    port: int | None = None
    backend: str | None = None
    heartbeat_s: float | None = None
    binding: processors.Binding = "none"
    prefix: bool = True
    to_stderr: bool = False
    grace_s: float = 30.0
    stdin: int | None = None
    secret: str | None = None
    start: Literal["auto", "fork", "plain"] = "auto"

    def why_plain(self) -> str | None:
        """Return why each rank gets a Python of its own, in words; None if ranks are forked from one process."""
        if self.start == "plain":
            return "that was asked for"
        return why_plain(self.command, self.ranks, binding=self.binding, stdin=self.stdin, asked=self.start == "fork")

    def environment(self, local_rank: int, ports: tuple[int, int], attempt: int) -> dict[str, str]:
        """Return the variables of one rank: torchrun's, and the port of this library beside torch's.

        The former names the latter, so that it does not lead a job that another launcher starts in a rank here.
        """
        places = {
            "RANK": self.before + local_rank,
            "WORLD_SIZE": self.size or self.ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_RANK": self.host,
            "MASTER_ADDR": self.address,
            "UNISONO_PORT": f"{ports[0]}/{ports[1]}",
            "MASTER_PORT": ports[1],
            "UNISONO_RESTARTS": attempt,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or max(1, cores() // self.ranks),
            "PYTHONUNBUFFERED": 1,
        }
        chosen = {} if self.backend is None else {"UNISONO_BACKEND": self.backend}
        if self.heartbeat_s is not None:
            chosen["UNISONO_HEARTBEAT"] = str(self.heartbeat_s)
        if self.secret is not None:
            chosen["UNISONO_SECRET"] = self.secret
        if self.binding != "none":
            chosen[processors.BOUND] = processors.shown(processors.placement(self.ranks, self.binding)[local_rank])
        # An outer torchrun's would lead the ranks to its own store.
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        return {**outer, **{name: str(value) for name, value in places.items()}, **chosen}
