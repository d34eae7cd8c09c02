"""Is a remote call as much faster than torch's rpc_sync as it was meant to be?

    python benchmarks/rpc_against_torch.py [--seconds 6] [--backends shm gloo]

Two ranks, each with an agent of unisono and one of torch (TensorPipe, its default options) in the same process. Rank 0
calls rank 1 by one and by the other in turn, in blocks in the order A B B A. A ratio is torch's median time of a call
by unisono's, of neighbouring blocks; the median of these is shown, with quartiles.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

import unisono as un

BLOCK = 100
LEAST = 8
IN_FLIGHT = 10_000
BOUNDS = {("shm", "empty"): 8.0, ("shm", "1 MiB"): 2.0, ("gloo", "empty"): 1.0, ("gloo", "1 MiB"): 1.0}


@un.rpc.expose
def nothing() -> None:
    """The empty call."""


@un.rpc.expose
def take(tensor: torch.Tensor) -> int:
    """A call that brings a tensor."""
    return tensor.numel()


def block(call: Callable[[], Any], count: int) -> float:
    """The median seconds of a call."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def side_by_side(ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float, count: int) -> list[Any]:
    """Median seconds of each, and the ratios of neighbouring blocks."""
    for call in (ours, theirs):
        block(call, 20)
    mine: list[float] = []
    other: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(mine) < LEAST or time.perf_counter() < deadline:
        for which in (0, 1) if len(mine) % 2 == 0 else (1, 0):
            (mine, other)[which].append(block((ours, theirs)[which], count))
    ratios = sorted(b / a for a, b in zip(mine, other, strict=True))
    quarter = len(ratios) // 4
    return [
        statistics.median(mine),
        statistics.median(other),
        statistics.median(ratios),
        ratios[quarter],
        ratios[-quarter - 1],
    ]


def per_second(start: Callable[[], torch.futures.Future[Any]]) -> float:
    """Calls per second with thousands of them in flight. All of them come back."""
    started = time.perf_counter()
    futures = [start() for _ in range(IN_FLIGHT)]
    ended = torch.futures.wait_all(futures)
    assert len(ended) == IN_FLIGHT
    return IN_FLIGHT / (time.perf_counter() - started)


def program(comm: un.Communicator, port: int, seconds: float) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    # Torch's name resolution may choose an interface that cannot be reached.
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    torch_rpc.init_rpc(f"worker{comm.rank}", rank=comm.rank, world_size=2, rpc_backend_options=options)
    agent = un.rpc.init(comm, f"worker{comm.rank}")
    found: dict[str, Any] | None = None
    if comm.rank == 0:
        tensor = torch.ones(1 << 18)
        assert agent.rpc_sync("worker1", take, (tensor,)) == torch_rpc.rpc_sync("worker1", take, (tensor,)) == 1 << 18
        found = {
            "empty": side_by_side(
                lambda: agent.rpc_sync("worker1", nothing),
                lambda: torch_rpc.rpc_sync("worker1", nothing),
                seconds,
                BLOCK,
            ),
            "1 MiB": side_by_side(
                lambda: agent.rpc_sync("worker1", take, (tensor,)),
                lambda: torch_rpc.rpc_sync("worker1", take, (tensor,)),
                seconds,
                BLOCK // 5,
            ),
            "rates": (
                per_second(lambda: agent.rpc_async("worker1", nothing)),
                per_second(lambda: torch_rpc.rpc_async("worker1", nothing)),
            ),
        }
    agent.shutdown()
    torch_rpc.shutdown()
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each comparison")
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = parser.parse_args()
    for backend in given.backends:
        found = un.launch(program, 2, backend, args=(free_port(), given.seconds), timeout=120)[0]
        for what in ("empty", "1 MiB"):
            mine, other, ratio, low, high = found[what]
            bound = BOUNDS.get((backend, what), 0.0)
            verdict = "kept" if ratio >= bound else "MISSED"
            print(
                f"{backend:5} {what:6} ours {mine * 1e6:8.1f} us, torch {other * 1e6:8.1f} us: {ratio:5.2f}x "
                f"({low:.2f} to {high:.2f}); at least {bound:g}x: {verdict}"
            )
        ours, theirs = found["rates"]
        print(f"{backend:5} {IN_FLIGHT} calls in flight: ours {ours:,.0f} calls/s, torch {theirs:,.0f} calls/s")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
