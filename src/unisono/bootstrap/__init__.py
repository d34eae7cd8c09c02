"""Start-up: finds this process's rank, the number of ranks, and the rendezvous.

Each module supports a scheme or a launcher; the module's function `find(request)` returns a `Rendezvous`. A scheme,
which users name in an `init_method`, needs only `find` and an entry in `_SCHEMES`. A launcher, which is recognised by
its environment variables, needs an entry in `_LAUNCHERS`, and also defines:

- `VARIABLES`: the variables that define a process's rank; `PREFIXES`: prefixes of all variables that the launcher sets;
- `START`: a command line that starts ranks with the launcher, for error messages;
- `launched()`: the `Launched` that the variables describe, in which invalid values are None; None if no variable is
  set;
- `detected(request)`: whether to call this module's `find`;
- `check(request)`: raises the `ValueError` that `find` would raise before communicating.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from unisono.bootstrap.rendezvous import InitRequest, Rendezvous, alone
from unisono.core import clock
from unisono.errors import CommError
from unisono.host.launched import Launched

__all__ = ["InitRequest", "Rendezvous", "find", "launched", "launchers"]

_SCHEMES = ("env", "file", "mpi", "tcp")
"""Modules of this package for schemes, each loaded on first use."""
_LAUNCHERS = ("env", "mpi", "slurm")
"""Modules of this package for launchers, in order of precedence."""
_TAKEN = "UNISONO_TAKEN_BY"
"""Environment variable that tells child processes this process's PID and rank."""


def find(
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float = 300.0,
    secret: str | bytes | None = None,
) -> Rendezvous:
    """Return this process's rank and its connection to the job; waits until all ranks have joined.

    Args:
        init_method: "tcp://host:port" (the host of rank 0), "file:///path", "env://", "mpi://" (requires MPI), or None.
            If `init_method` is None, the environment defines the ranks: torchrun's RANK, WORLD_SIZE, MASTER_ADDR and
            MASTER_PORT, or else mpirun, or else a Slurm step; if the environment defines no ranks, this process is a
            single rank.
        rank: This process's rank, from 0; needed with tcp:// and file://.
        world_size: Number of ranks; needed with tcp:// and file://.
        timeout_s: Seconds within which all ranks must join. If ranks are missing at the end of that time, every rank
            that has joined raises an error.
        secret: Secret shared by all ranks; see `unisono.control.sockets.find_secret`.

    Raises:
        ValueError: The arguments or the environment are inconsistent, or this process has inherited the variables of
            the rank that started it.
        CommTimeoutError: Ranks are missing (the error names them), or rank 0 cannot be reached.
        MismatchError: Two processes claim the same rank, or ranks disagree on the number of ranks.
        CommError: Rank 0 cannot listen on the address, or the secrets differ.

    Example:
        >>> place = find()
        >>> place.rank, place.size
        (0, 1)
        >>> place.close()
    """
    request = InitRequest(init_method, rank, world_size, clock.now() + timeout_s, secret)
    if init_method is None:
        way = next((each for each in launchers() if each.detected(request)), None)
    else:
        scheme, separator, _ = init_method.partition("://")
        if not separator or scheme not in _SCHEMES:
            known = ", ".join(f"{name}://" for name in _SCHEMES)
            raise ValueError(f"unknown init_method {init_method!r}; known: {known}")
        way = _module(scheme)
    _take_place(getattr(way, "VARIABLES", ()))
    try:
        return alone(request) if way is None else way.find(request)
    except CommError as error:
        error.locate(rank=request.rank, size=request.size, operation="init")
        raise


def launchers() -> list[Any]:
    """Return the modules of the launchers that can be recognised, in order of precedence."""
    return [_module(name) for name in _LAUNCHERS]


def launched() -> Launched | None:
    """Return this process's rank according to its launcher's variables; None if no launcher started it."""
    return next(filter(None, (each.launched() for each in launchers())), None)


def _module(name: str) -> Any:
    return importlib.import_module(f"unisono.bootstrap.{name}")


def _take_place(names: Sequence[str]) -> None:
    """Raise `ValueError` if this process has inherited the variables from a rank that started it."""
    there = {name: value for name in names if (value := os.environ.get(name))}
    if not there:
        return
    place = " ".join(f"{name}={value}" for name, value in there.items())
    # Torchrun gives each rank of each run a separate error file, so the file's path identifies the run.
    agent = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    number, taken, agent_then = (os.environ.get(_TAKEN, "") + "\n\n").split("\n")[:3]
    if number not in ("", str(os.getpid())):
        if taken == place:
            raise ValueError(
                f"this process has inherited {place} from process {number}, which is that rank. Start an inner job by "
                "`unisono run` or torchrun; for another launcher, or a world of one, remove these variables: "
                f"`env -u {' -u '.join(there)}`"
            )
        if agent and agent == agent_then:
            # This process descends from a rank that torchrun started, but its variables have changed. Don't look for
            # the agent's store: there is none at the address in the new variables.
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ[_TAKEN] = f"{os.getpid()}\n{place}\n{agent}"
