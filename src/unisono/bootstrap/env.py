"""env://: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as set by torchrun and most launchers."""

from __future__ import annotations

import os

from unisono.bootstrap.rendezvous import InitRequest, RankClaim, Rendezvous, checked, env_number
from unisono.bootstrap.tcp import find_at
from unisono.bootstrap.tcp_store import find_in_store
from unisono.host.launched import Launched, number

__all__ = ["PREFIXES", "START", "VARIABLES", "check", "detected", "find", "launched"]

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "ROLE_", "GROUP_")
START = "torchrun --nproc-per-node 2 train.py"


def launched() -> Launched | None:
    """Return the rank that RANK and WORLD_SIZE give to this process, as set by torchrun or another launcher."""
    # An empty variable counts as unset.
    if not (os.environ.get("RANK") or os.environ.get("WORLD_SIZE")):
        return None
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the environment"
    return Launched(by, number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE"))


def detected(request: InitRequest) -> bool:
    """Return whether the caller or the environment sets this process's rank or the number of ranks."""
    return request.rank is not None or request.size is not None or launched() is not None


def find(request: InitRequest) -> Rendezvous:
    """Return the rendezvous from the environment; the caller's arguments take precedence over the variables."""
    host, port = check(request)
    rank, size = request.numbers()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"torchrun's agent at {host}:{port}" if by_agent else f"MASTER_ADDR {host}:{port}"
    source = f"rank {rank} of {size} from the environment, rendezvous at {where}"
    claim = RankClaim(rank, size, env_number("LOCAL_RANK"), request.deadline, source)
    if _private_port() is not None and not by_agent:
        return find_at(claim, host, port, request.secret)
    return find_in_store(claim, host, port, request.secret, agent=by_agent)


def check(request: InitRequest) -> tuple[str, int]:
    """Return the rendezvous address, after setting rank and size in the request.

    Raises:
        ValueError: The environment is inconsistent; the error explains which variables to set.
    """
    request.rank, request.size = _both(request)
    host = os.environ.get("MASTER_ADDR")
    port = _private_port() or env_number("MASTER_PORT")
    if not host or port is None:
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise ValueError(
            f"{missing} is not set; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it "
            "on every rank, or start with torchrun"
        )
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT is {port}; a port is a number from 1 to 65535")
    return host, port


def _private_port() -> int | None:
    """Return the port reserved for this library (torch's store uses MASTER_PORT); None if no port is reserved.

    `unisono run` sets UNISONO_PORT together with the job's MASTER_PORT. If MASTER_PORT has changed, as in a job that is
    started inside a rank of another job, UNISONO_PORT is ignored.
    """
    value = os.environ.get("UNISONO_PORT", "")
    port, _, other = value.partition("/")
    if not port or (other and other != os.environ.get("MASTER_PORT")):
        return None
    if not port.isdigit():
        raise ValueError(f"UNISONO_PORT is {value!r}, which is not a number")
    return int(port)


def _both(request: InitRequest) -> tuple[int, int]:
    rank = env_number("RANK") if request.rank is None else request.rank
    size = env_number("WORLD_SIZE") if request.size is None else request.size
    if rank is None or size is None:
        if rank is None and size is None:
            raise ValueError("neither RANK nor WORLD_SIZE is set; start with torchrun, or pass rank and world_size")
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ValueError(
            f"{there} is known but {missing} is not; set both on every rank, or neither for a world of one"
        )
    return checked(rank, size)
