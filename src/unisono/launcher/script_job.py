"""Description of a script and its ranks, and the callbacks for events from running ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from unisono.host import processors
from unisono.host.processors import cores
from unisono.launcher.forked_ranks import sets_environment

__all__ = ["Events", "Report", "ScriptJob"]

_WATCHES = ("PYTHONPROFILEIMPORTTIME", "PYTHONPERFSUPPORT", "PYTHON_PERF_JIT_SUPPORT", "PYTHONDUMPREFS")
"""Variables that make Python trace or profile a whole process, and that `sys.flags` does not show."""

Report = dict[str, Any]
"""A rank's report about its uncaught error: its `kind`, `time`, full `text`, and `brief` text."""


class Events(Protocol):
    """Callbacks for events from running ranks, called from several threads."""

    def output(self, rank: int | None, stream: int, data: bytes) -> None:
        """Handle output on stream 1 or 2; rank is None for the process that forks the ranks. May raise `OSError`."""
        ...

    def ended(self, rank: int, status: int, report: Report | None) -> None:
        """Handle a rank's error report and exit status (negative if a signal killed the rank).

        Must not raise an exception, because the calling thread also reports when other ranks exit.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A script, and its ranks on one host.

    Attributes:
        command: Arguments for Python: a file, or "-m" and a module, followed by the script's own arguments.
        ranks: Number of ranks on this host.
        host: Index of this host among all hosts.
        before: Number of ranks on earlier hosts.
        size: Number of ranks on all hosts; if None, there is only this host.
        address: Address of the first host.
        port: Port of rank 0; torch's rendezvous uses the next port. If None, free ports are chosen.
        backend, heartbeat_s: Defaults for `init`; None if `init` should choose.
        binding: Which cores each rank is bound to; see `unisono.host.processors.placement`.
        prefix: Whether each line of output begins with the rank that printed it.
        to_stderr: Whether the ranks' standard output is written to standard error.
        grace_s: Seconds for ranks to save a checkpoint and exit after a request to stop.
        stdin: The rank on this host that reads standard input; None if no rank does.
        secret: Secret with which ranks authenticate each other; if None, it is read from the environment or the user's
            key file.
        start: "fork" forks all ranks from one process that has imported torch, "plain" starts a Python interpreter for
            each rank, and "auto" forks if there are more ranks than cores and the script seems suitable.
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

    def fork_obstacle(self) -> str | None:
        """Return the reason why ranks are not forked from one process; None if they are."""
        flags = sys.flags
        options = any((sys.warnoptions, sys._xoptions, flags.verbose, flags.inspect, flags.dev_mode))
        # With "fork", ranks are forked even if that gains little or the script seems unsuitable.
        auto = self.start == "auto"
        reasons = {
            "that was asked for": self.start == "plain",
            "forking a process that has torch in memory is safe on Linux only": sys.platform != "linux",
            "Python has -W, -X, -v or -i, or a variable for it, whose effect begins before the fork": (
                options or any(map(os.environ.get, _WATCHES))
            ),
            "each rank is bound to processors before it imports torch": self.binding != "none",
            "a rank reads standard input": self.stdin is not None,
            "each rank has a core to import torch on": auto and self.ranks <= cores(),
            "the script sets variables of the environment, which torch may read when it is imported": (
                auto and sets_environment(self.command)
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def environment(self, local_rank: int, ports: tuple[int, int], attempt: int) -> dict[str, str]:
        """Return a rank's environment: the variables that torchrun also sets, and this library's own.

        UNISONO_PORT contains this library's port and torch's. A rank ignores UNISONO_PORT if torch's port differs from
        MASTER_PORT, for example in a job that another launcher starts inside a rank of this job.
        """
        variables: dict[str, object] = {
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
            "UNISONO_BACKEND": self.backend,
            "UNISONO_HEARTBEAT": self.heartbeat_s,
            "UNISONO_SECRET": self.secret,
        }
        if self.binding != "none":
            variables[processors.BOUND] = processors.shown(processors.placement(self.ranks, self.binding)[local_rank])
        # If this launcher runs under torchrun, drop torchrun's variables: they would make the ranks use torchrun's
        # store.
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        return {**outer, **{name: str(value) for name, value in variables.items() if value is not None}}
