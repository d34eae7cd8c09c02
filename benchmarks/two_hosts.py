"""Speed of backend shm+tcp between two hosts against torch's gloo, over free, slow and distant links.

Results (two network namespaces on one machine of 2 cores, float32, one thread per rank) are in docs/benchmarks.md. To
measure on your machine, as root:

    python benchmarks/two_hosts.py [--seconds 4] [--most 16M] [--ranks 2 4] [--links free near far]

Hosts are those of `unisono.testing.Network`. Gloo is torch's own ProcessGroupGloo of the same ranks, over the same
interface. Ratios are gloo's time over that of shm+tcp, or the reverse where it says so, the median of neighbouring
samples, with quartiles; results are checked outside the clock. Beside each is what the link gave when it was idle
again, and the share of a core that the relay took meanwhile, if there was one. Bytes are those that the interface of
host 0 sent, with all headers and acknowledgements, as multiples of the message. A ring over all p ranks sends 2(p-1)/p.
A training step with DDP on gloo is measured beside one with a GradientAverager on shm+tcp.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from _bounds import BoundCheck
from _questions import between, parser
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from unisono.testing import Network
from unisono.testing.namespaced_ranks import HostRanks, LinkReport, obstacle
from unisono.tools.bench import (
    PEERS,
    Result,
    Settings,
    Spread,
    Timings,
    heading,
    interleave,
    line,
    parse_sizes,
    shown_size,
    summary,
    timed,
)
from unisono.tools.bench.peers.gloo import Gloo
from unisono.tools.bench.ranks import measure

BACKEND, PEER = "shm+tcp", "torch"
SIZES = "8,1K,16K,64K,1M,16M"
LINKS: dict[str, dict[str, Any]] = {
    "free": {"rate": None},
    "near": {"rate": "1gbit"},
    "far": {"rate": "100mbit", "burst": "16kb", "delay": "2ms"},
}
# The largest fraction of gloo's time, by the first and the last of some sizes.
BOUNDS = {("8", "64K"): 0.5, ("1M", "16M"): 0.7}
COUNTED = (1 << 20, 16 << 20)
TIMES = 3
TIMEOUT_S = 600.0

Figures = tuple[list[Result], dict[str, float], Timings | None]


class _OverEth0(Gloo):
    """Gloo on the interface of a host of `Network`."""

    device: ClassVar[dict[str, str]] = {"interface": "eth0"}


PEERS.register(PEER, _OverEth0)


def rank(
    comm: un.Communicator, given: Settings, turn: Barrier, folders: tuple[Path, Path], trained_s: float
) -> Figures:
    """Return all figures, the same on every rank. The link is idle between two waits for `turn`."""

    def pause(result: Result) -> None:
        turn.wait(TIMEOUT_S)
        turn.wait(TIMEOUT_S)

    results = measure(comm, given, folders[0], pause)
    return results, traffic(comm, given, folders[1]), steps(comm, trained_s) if trained_s else None


def traffic(comm: un.Communicator, given: Settings, folder: Path) -> dict[str, float]:
    """Return the bytes that this rank's host sends for a call, over those of the message."""
    found = {}
    peer = PEERS[PEER](comm, folder)
    for workload in given.workloads:
        if workload.nbytes in COUNTED:
            slot = workload.slot(torch.zeros(workload.numel))
            calls = {"own": partial(comm.all_reduce, slot.target), "gloo": peer.bind(workload, slot)}
            for name, call in calls.items():
                found[f"{shown_size(workload.nbytes)}, {name}"] = sent(comm, call) / workload.nbytes
    peer.close()
    return found


def sent(comm: un.Communicator, call: Callable[[], object]) -> float:
    comm.barrier()
    before = counted()
    for _ in range(TIMES):
        call()
    comm.barrier()
    return (counted() - before) / TIMES


def counted() -> int:
    """Return the bytes sent by the interface of this host, that is of this thread's network namespace."""
    line = next(line for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])


def steps(comm: un.Communicator, seconds: float) -> Timings:
    """Time a training step with DDP on gloo and with a GradientAverager; both give the same weights."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with tempfile.NamedTemporaryFile() as file:
        name = comm.broadcast_object(file.name)
        dist.init_process_group("gloo", init_method=f"file://{name}", rank=comm.rank, world_size=comm.size)
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

    samples = {name: timed(partial(step, model), comm, after=same) for name, model in (("gloo", ddp), ("own", plain))}
    timings = interleave(samples, comm, seconds=seconds, most=400).slowest(comm)
    step(ddp), step(plain)
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    averager.remove()
    dist.destroy_process_group()
    return timings


def measured(link: str, given: Settings, trained_s: float) -> list[BoundCheck]:
    """Measure one link, print its table, and return the figures that have bounds."""
    each, reports = given.ranks // 2, list[LinkReport]()
    turn = multiprocessing.get_context("forkserver").Barrier(given.ranks + 1)
    with Network(2, **LINKS[link]) as network, tempfile.TemporaryDirectory() as folder:
        folders = Path(folder, "a"), Path(folder, "b")
        for made in folders:
            made.mkdir()
        args = (given, turn, folders, trained_s)
        options: dict[str, Any] = {"timeout": TIMEOUT_S}
        network.report()
        with HostRanks(network, (each, each), rank, *args, backend=BACKEND, options=lambda _: options) as ranks:
            for _ in given.sizes:
                turn.wait(TIMEOUT_S)
                reports.append(network.report())
                turn.wait(TIMEOUT_S)
            found = ranks.results(TIMEOUT_S)
    for its in found:
        if not isinstance(its, tuple):
            raise SystemExit(f"a rank failed: {its!r}")
    results, bytes_sent, trained = found[0]
    what = f"{each} + {each} ranks, {link}"
    print(
        f"# link {link}: {', '.join(f'{name} {value}' for name, value in LINKS[link].items())}",
        heading(given),
        sep="\n",
    )
    for result, report in zip(results, reports, strict=True):
        print(line(result), f"  {report}")
    print(summary(results))
    for name, factor in bytes_sent.items():
        print(f"# bytes from host 0, {name}: {factor:.2f} of the message")
    if trained is not None:
        print(f"# training step, DDP on gloo/own: {trained.compared('gloo', 'own')}")
    print(flush=True)
    return findings(what, results)


def findings(what: str, results: list[Result]) -> list[BoundCheck]:
    found = []
    for (first, last), bound in BOUNDS.items():
        for result in between(results, first, last):
            ratio = result.against[PEER].ratio
            inverse = Spread(1 / ratio.high, 1 / ratio.median, 1 / ratio.low)
            found.append(BoundCheck(f"{what}, {shown_size(result.nbytes)}, own/gloo", inverse, bound, most=True))
    return found


def options() -> argparse.Namespace:
    made = parser(__doc__, seconds=4.0)
    made.add_argument("--most", default="16M", help="leave out larger messages (%(default)s)")
    made.add_argument("--ranks", type=int, nargs="+", default=[2], help="on each host (%(default)s)")
    made.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    return made.parse_args()


def main() -> None:
    given = options()
    reason = obstacle(slow="far" in given.links)
    if reason is not None:
        print(f"not measured: {reason}")
        return
    (most,) = parse_sizes(given.most)
    sizes = tuple(size for size in parse_sizes(SIZES) if size <= most)
    found: list[BoundCheck] = []
    for each in given.ranks:
        settings = Settings(
            backend=BACKEND, ranks=2 * each, sizes=sizes, against=(PEER,), seconds=given.seconds, least=5
        )
        for link in given.links:
            found += measured(link, settings, given.seconds)
    print(*found, sep="\n")


if __name__ == "__main__":
    main()
