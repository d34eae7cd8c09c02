"""Measure tensors on GPUs, and write docs/benchmarks-gpu.md. `make gpu` runs it after its tests.

    python benchmarks/_gpu_report.py [--device cuda] [--seconds 1] [--page docs/benchmarks-gpu.md]

Ranks share a GPU where there are fewer. Each sample is the time from one barrier to the moment at which the results can
be read; samples of unisono and of torch's own group take turns, and a ratio is unisono's time over torch's, the median
of neighbouring samples. Torch's groups take no devices but CUDA: on others, unisono is measured alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un

SIZES = (8, 4 << 10, 256 << 10, 4 << 20, 64 << 20)
LAYERS, WIDTH, SAMPLES = 4, 1024, 64

Step = Callable[[], object]


def timed(comm: un.Communicator, step: Step) -> float:
    """Return the seconds of one call."""
    comm.barrier()
    begin = time.perf_counter()
    step()
    torch.accelerator.current_stream(comm.device).synchronize()
    return time.perf_counter() - begin


def measured(comm: un.Communicator, ours: Step, theirs: Step | None, seconds: float) -> tuple[float, float | None]:
    """Return the median seconds of a step, and its median ratio to the other step. Collective."""
    steps = [ours] if theirs is None else [ours, theirs]
    for step in steps:
        timed(comm, step)
    once = comm.all_gather_object(sum(timed(comm, step) for step in steps))
    rounds = max(5, min(200, round(seconds / max(once))))
    samples = [[max(comm.all_gather_object(timed(comm, step))) for step in steps] for _ in range(rounds)]
    ratio = None if theirs is None else median(mine / other for mine, other in samples)
    return median(mine for mine, *_ in samples), ratio


def torchs_group(comm: un.Communicator, backend: str, store: str) -> dist.ProcessGroup | None:
    """Return torch's group of the same ranks, where it takes the device."""
    if comm.device.type != "cuda":
        return None
    limit, device = timedelta(seconds=60), comm.device if backend == "nccl" else None
    where = {"rank": comm.rank, "world_size": comm.size, "device_id": device}
    dist.init_process_group(backend, f"file://{store}", timeout=limit, **where)
    return dist.group.WORLD


def model_on(device: torch.device) -> nn.Module:
    """Return a model of some layers with the same weights on each rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers).to(device)


def program(comm: un.Communicator, backend: str, store: str, seconds: float) -> list[tuple[str, float, float | None]]:
    """Return the name, the seconds and the ratio of each measurement."""
    if comm.size > torch.cuda.device_count():
        # So that ranks of nccl may share a GPU: each is a host of its own then.
        os.environ["NCCL_HOSTID"] = f"rank {comm.rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    group = torchs_group(comm, backend, store)
    rows = []
    for nbytes in SIZES:
        x, y = (torch.zeros(nbytes // 4, device=comm.device) for _ in range(2))
        theirs = None if group is None else partial(dist.all_reduce, y)
        found = measured(comm, partial(comm.all_reduce, x), theirs, seconds)
        rows.append((f"{nbytes:,} B", *found))
    batch = torch.randn(SAMPLES, WIDTH, device=comm.device)
    averaged = model_on(comm.device)
    un.GradientAverager(averaged, comm.dup())
    wrapped = None if group is None else DistributedDataParallel(model_on(comm.device))

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    theirs = None if wrapped is None else partial(step, wrapped)
    rows.append(("backward", *measured(comm, partial(step, averaged), theirs, seconds)))
    if group is not None:
        dist.destroy_process_group()
    return rows


def places(kind: str) -> Iterator[tuple[str, int, str]]:
    """Yield unisono's backends, numbers of ranks and torch's backends to compare with."""
    if kind == "cuda":
        yield from (("nccl", n, "nccl") for n in sorted({1, 2, torch.cuda.device_count()}))
    yield from ((backend, n, "gloo") for backend in ("shm", "gloo") for n in (2, 4))


def report(kind: str, seconds: float) -> str:
    """Return the page."""
    count = torch.get_device_module(kind).device_count()
    card = torch.cuda.get_device_name(0) if kind == "cuda" else kind
    what = f"Results of `make gpu` on {datetime.now(UTC).date()}: {count} x {card}, torch {torch.__version__}."
    columns = (
        "Times in ms: per all_reduce, by message size, and per backward pass through"
        f" {LAYERS} layers of {WIDTH} x {WIDTH} weights."
    )
    ratio = "The ratio to torch's process group, measured in one run, is in brackets: lower is better."
    lines = ["# Benchmarks on GPUs", "", what, columns, ratio, ""]
    for backend, ranks, other in places(kind):
        with tempfile.TemporaryDirectory() as folder:
            run = partial(un.launch, program, ranks, backend, device=kind, timeout=60)
            rows = run(args=(other, f"{folder}/store", seconds))[0]
        if not lines[-1]:
            lines += [
                f"| unisono against torch | {' | '.join(name for name, _, _ in rows)} |",
                "|---" * (len(rows) + 1) + "|",
            ]
        cells = [f"{1e3 * s:.3f}" + ("" if r is None else f" ({r:.2f})") for _, s, r in rows]
        lines.append(f"| {backend} against {other}, {ranks} ranks | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print or write the page."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda", help="device of the tensors (%(default)s)")
    arguments.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement (%(default)s)")
    arguments.add_argument("--page", type=Path, help="page to write; printed if not given")
    given = arguments.parse_args()
    page = report(given.device, given.seconds)
    if given.page is None:
        print(page)
    else:
        given.page.write_text(page)


if __name__ == "__main__":
    main()
