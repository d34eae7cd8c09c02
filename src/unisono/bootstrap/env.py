"""env://: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and most launchers set them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from unisono.bootstrap.hosting import lease
from unisono.bootstrap.meeting import Seat, meet
from unisono.bootstrap.place import Place, Request, checked
from unisono.bootstrap.tcp import find_at
from unisono.control.secret import find_secret
from unisono.errors import CommTimeoutError

__all__ = ["find", "here"]


def here(request: Request) -> bool:
    """Whether the environment, or the caller, speaks of ranks at all."""
    given = request.rank is not None or request.size is not None
    return given or "RANK" in os.environ or "WORLD_SIZE" in os.environ


def find(request: Request) -> Place:
    """The place that the environment tells; what the caller gave goes before it."""
    rank, size = _both(request)
    host = os.environ.get("MASTER_ADDR")
    port = _number("MASTER_PORT")
    if not host or port is None:
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise ValueError(
            f"{missing} is not set; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it "
            "on every rank, or start with torchrun"
        )
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT is {port}; a port is a number from 1 to 65535")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"torchrun's agent at {host}:{port}" if by_agent else f"MASTER_ADDR {host}:{port}"
    source = f"rank {rank} of {size} by the environment, met at {where}"
    seat = Seat(rank, size, _number("LOCAL_RANK"), request.deadline, source)
    return (_find_by_agent if by_agent else find_at)(seat, host, port, request.secret)


def _both(request: Request) -> tuple[int, int]:
    rank = _number("RANK") if request.rank is None else request.rank
    size = _number("WORLD_SIZE") if request.size is None else request.size
    if rank is None or size is None:
        if rank is None and size is None:
            raise ValueError("neither RANK nor WORLD_SIZE is set; start with torchrun, or pass rank and world_size")
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ValueError(
            f"{there} is known but {missing} is not; set both on every rank, or neither for a world of one"
        )
    return checked(rank, size)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None


def _find_by_agent(seat: Seat, host: str, port: int, secret: str | bytes | None) -> Place:
    """Under torchrun the port is taken by its agent's store, through which rank 0 tells its own address.

    That store authenticates nobody; who speaks at the address it tells still has to know the secret.
    """
    import torch.distributed as dist

    known = find_secret(secret)
    hosted = None
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(1.0, seat.left_s)))
        job = f"unisono/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        # The first init of every rank meets the first init of every other.
        key = f"{job}/init {store.add(f'{job}/rank {seat.rank}', 1)}"
        if seat.rank == 0:
            hosted = lease(f"{job} at {host}:{port}", known, _own_address(host, port), 0)
            store.set(key, " ".join(map(str, hosted.server.address)))
        store.wait([key], timedelta(seconds=max(1.0, seat.left_s)))
        server_host, server_port = store.get(key).decode().rsplit(" ", 1)
    except dist.DistError as error:
        raise CommTimeoutError(
            f"rank 0 has not told its address to torchrun's agent at {host}:{port} in time. Is it alive? ({error})"
        ) from error
    return meet(seat, (server_host, int(server_port)), known, hosted)


def _own_address(host: str, port: int) -> str:
    """The address of this host on the way to another one. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own
