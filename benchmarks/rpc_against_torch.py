"""Speed of a remote call against torch's rpc_sync.

    python benchmarks/rpc_against_torch.py [--seconds 6] [--backends shm gloo]

Two ranks, each with an agent of unisono and one of torch (TensorPipe, its default options) in the same process. Rank 0
calls rank 1 by each agent in turn, in blocks in the order A B B A. A ratio is torch's time of a call over unisono's,
in neighbouring blocks; the median is shown, with quartiles.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from _bounds import BoundCheck
from _questions import parser

import unisono as un
from unisono.tools.bench import Timings, interleave, on_ranks, timed

BLOCK = 100
IN_FLIGHT = 10_000
BOUNDS = {("shm", "empty"): 8.0, ("shm", "1 MiB"): 2.0, ("gloo", "empty"): 1.0, ("gloo", "1 MiB"): 1.0}


@un.rpc.expose
def nothing() -> None:
    """The empty call."""


@un.rpc.expose
def take(tensor: torch.Tensor) -> int:
    """A call with a tensor as argument."""
    return tensor.numel()


def per_second(start: Callable[[], torch.futures.Future[Any]]) -> float:
    """Return calls per second with thousands of them in flight. All of them complete."""
    started = time.perf_counter()
    futures = [start() for _ in range(IN_FLIGHT)]
    ended = torch.futures.wait_all(futures)
    assert len(ended) == IN_FLIGHT
    return IN_FLIGHT / (time.perf_counter() - started)


def ask(agent: un.rpc.Agent, seconds: float) -> tuple[dict[str, Timings], tuple[float, float]]:
    """Return timings of calls, and rates with many in flight."""
    tensor = torch.ones(1 << 18)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
        "empty": (nothing, (), BLOCK),
        "1 MiB": (take, (tensor,), BLOCK // 5),
    }
    assert agent.rpc_sync("worker1", take, (tensor,)) == torch_rpc.rpc_sync("worker1", take, (tensor,)) == 1 << 18
    found = {}
    for what, (function, args, count) in calls.items():
        ways = {"own": agent.rpc_sync, "torch": torch_rpc.rpc_sync}
        samples = {
            name: timed(lambda call=call, f=function, a=args: call("worker1", f, a), count=count)
            for name, call in ways.items()
        }
        found[what] = interleave(samples, seconds=seconds)
    rates = (
        per_second(lambda: agent.rpc_async("worker1", nothing)),
        per_second(lambda: torch_rpc.rpc_async("worker1", nothing)),
    )
    return found, rates


def program(comm: un.Communicator, seconds: float, folder: Path) -> Any:
    # Torch's name resolution may choose an unreachable interface.
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    torch_rpc.init_rpc(f"worker{comm.rank}", rank=comm.rank, world_size=2, rpc_backend_options=options)
    agent = un.rpc.init(comm, f"worker{comm.rank}")
    found = ask(agent, seconds) if comm.rank == 0 else None
    agent.shutdown()
    torch_rpc.shutdown()
    return found


def main() -> None:
    options = parser(__doc__, seconds=6.0)
    options.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = options.parse_args()
    for backend in given.backends:
        found, (ours, theirs) = on_ranks(program, 2, backend, (given.seconds,))[0]
        for what, timings in found.items():
            own, torchs = (timings.of(name).median * 1e6 for name in ("own", "torch"))
            text = f"{backend}, {what}, own {own:.1f} us, torch {torchs:.1f} us, torch/own"
            print(BoundCheck(text, timings.ratio("torch", "own"), BOUNDS.get((backend, what), 0.0)))
        print(
            f"        {backend}, {IN_FLIGHT} calls in flight: own {ours:,.0f} calls/s, torch {theirs:,.0f} calls/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
