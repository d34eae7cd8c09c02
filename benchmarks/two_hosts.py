"""Speed of a hierarchical all_reduce between two hosts against gloo's own, over a 1 Gbit/s link.

Results (two network namespaces on one machine of 2 cores, float32) are in docs/benchmarks.md. To measure your machine:

    python benchmarks/two_hosts.py [--ranks 2 4] [--seconds 4] [--rate 1gbit]

Hosts are network namespaces joined by a switch, each with its own address, and limited to the rate by `tc` (tbf), so
this needs root. Gloo is torch's own process group of the same ranks, over the same interface. Ratios are gloo's time
over that of `init("auto")`, the median of neighbouring samples, with quartiles. Bytes are those sent by a host's
interface, with all headers and acknowledgements, against a ring over all ranks, which sends 2(p-1)/p of the message.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from _questions import parser
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from unisono.testing.namespaced_ranks import HostRanks, Network, obstacle
from unisono.tools.bench import Finding, Spread, Timings, interleave, timed

SHORT = (4 << 10, 16 << 10, 64 << 10)
LONG = 25 << 20
TIMES = 3
# Minimum ratios of a short and of the long message, and maximum fraction of a ring's bytes, by ranks on each host.
BOUNDS = {2: (3.0, 1.35, 0.68), 4: (3.0, 1.35, 0.58)}

Figures = dict[str, Timings | float]


def rank(comm: un.Communicator, seconds: float) -> Figures:
    """Return all figures, as measured on rank 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1000}",
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=120),
    )
    found: Figures = {}
    for nbytes in (*SHORT, LONG):
        tensor = torch.ones(nbytes // 4)
        ways = {"gloo": partial(dist.all_reduce, tensor), "own": partial(comm.all_reduce, tensor)}
        found[f"{nbytes} B"] = beside(comm, ways, partial(verified, tensor, comm.size), seconds)
    with un.init("gloo", timeout=120) as flat:
        tensor = torch.ones(LONG // 4)
        ring = sent(comm, lambda: flat.all_reduce(tensor, "max", algorithm="ring"))
        found["bytes"] = sent(comm, lambda: comm.all_reduce(tensor, "max")) / ring
        found["bytes of gloo"] = sent(comm, lambda: dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)) / ring
    found["step"] = steps(comm, seconds)
    dist.destroy_process_group()
    return found


def beside(
    comm: un.Communicator, ways: dict[str, Callable[[], object]], after: Callable[[], object], seconds: float
) -> Timings:
    samples = {name: timed(way, comm, after=after) for name, way in ways.items()}
    return interleave(samples, comm, seconds=seconds, most=400).slowest(comm)


def verified(tensor: torch.Tensor, expected: float) -> None:
    assert tensor[0] == expected
    assert tensor[-1] == expected
    tensor.fill_(1.0)


def sent(comm: un.Communicator, call: Callable[[], object]) -> int:
    """Return the bytes that this rank's host sends for some calls."""
    call()
    comm.barrier()
    before = counted()
    for _ in range(TIMES):
        call()
    comm.barrier()
    return counted() - before


def counted() -> int:
    """Return the bytes sent by the interface of this host, that is of this thread's network namespace."""
    line = next(line for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])


def steps(comm: un.Communicator, seconds: float) -> Timings:
    """Time a training step with DDP on gloo and with a GradientAverager; both give the same weights."""
    torch.manual_seed(0)
    widths = (512, 2048, 1024, 10)
    plain, wrapped = ((nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))) for _ in "ab")
    wrapped.load_state_dict(plain.state_dict())
    ddp, averager = DistributedDataParallel(wrapped, gradient_as_bucket_view=True), un.GradientAverager(plain, comm)
    data = torch.randn(8, widths[0], generator=torch.Generator().manual_seed(comm.rank))

    def step(model: nn.Module) -> None:
        model(data).square().mean().backward()

    def same() -> None:
        for module in (plain, wrapped):
            module.zero_grad(set_to_none=True)

    timings = beside(comm, {"gloo": partial(step, ddp), "own": partial(step, plain)}, same, seconds)
    step(ddp), step(plain)
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    averager.remove()
    return timings


def findings(each: int, found: Figures) -> list[Finding]:
    short, long, most = BOUNDS[each]
    what = f"{each} + {each} ranks"
    listed = [Finding(f"{what}, {nbytes >> 10} KiB, gloo/own", spread(found[f"{nbytes} B"]), short) for nbytes in SHORT]
    listed.append(Finding(f"{what}, {LONG >> 20} MiB, gloo/own", spread(found[f"{LONG} B"]), long))
    listed.append(Finding(f"{what}, bytes over the line, own/ring", spread(found["bytes"]), most, most=True))
    listed.append(Finding(f"{what}, training step, DDP on gloo/own", spread(found["step"]), 1.1))
    return listed


def spread(figure: Timings | float) -> Spread:
    return Spread.of([figure]) if isinstance(figure, float) else figure.ratio("gloo", "own")


def main() -> None:
    options = parser(__doc__, seconds=4.0)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=BOUNDS, help="on each host")
    options.add_argument("--rate", default="1gbit", help="of the line, as tc writes it (%(default)s)")
    given = options.parse_args()
    reason = obstacle()
    if reason is not None:
        print(f"not measured: {reason}")
        return
    ended = []
    with Network(2, given.rate) as network:
        for each in given.ranks:
            with HostRanks(network, (each, each), rank, given.seconds, options=lambda _: {"timeout": 120.0}) as ranks:
                found = ranks.results(600.0)
            for its in found:
                if isinstance(its, Exception):
                    raise its
            for name, figure in found[0].items():
                shown = f"{figure:.3f}" if isinstance(figure, float) else figure.compared("gloo", "own")
                print(f"{each} + {each} ranks, {name:>16}: {shown}", flush=True)
            ended += findings(each, found[0])
    print(*ended, sep="\n")


if __name__ == "__main__":
    main()
