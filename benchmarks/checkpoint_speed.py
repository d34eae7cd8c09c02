"""Cost of a checkpoint: save, async_save and load against torch.save with fsync, DCP, and raw writing.

Results (2 ranks, 2 cores) are in docs/benchmarks.md. To measure on your machine and disk:

    python benchmarks/checkpoint_speed.py [--mib 512] [--tensors 32] [--ranks 2] [--rounds 4] [--pairs 20]

All ways take turns in one run, on the same state and disk. Files are removed and the disk is synced between them,
outside the clock. A time is from the common start of all ranks to the end of the last one. Cold is a load after
dropping the files' pages from memory; the kernel counts the bytes then read from the disk, summed over all ranks.
The cost of checks on cold loads is measured by `--pairs` separate loads, because the disk's variance exceeds it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _bounds import BoundCheck
from _questions import parser

import unisono as un
from unisono.tools.bench import Sample, Spread, Timings, interleave, on_ranks, timed

State = dict[str, torch.Tensor]
Bytes = dict[str, list[int]]


def make(mib: int, count: int) -> State:
    generator = torch.Generator().manual_seed(0)
    return {f"t{i}": torch.randn((mib << 18) // count, generator=generator) for i in range(count)}


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def raw(path: Path, state: State) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            left = memoryview(tensor.numpy()).cast("B")
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def torch_save(path: Path, state: State) -> None:
    torch.save(state, path)
    sync(path)


def drop(path: Path) -> None:
    """Drop the pages of all files from memory."""
    os.sync()
    for file in [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def from_disk() -> int:
    """Return the bytes read from disks for this process; 0 where the system does not count them."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split("read_bytes: ")[1].split()[0]) if counts.exists() else 0


def clean(comm: un.Communicator, *paths: Path) -> None:
    comm.barrier()
    if comm.rank == 0:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.sync()
    comm.barrier()


def measure(comm: un.Communicator, folder: Path, given: argparse.Namespace, _: Path) -> tuple[Timings, Bytes]:
    warnings.simplefilter("ignore")
    state = make(given.mib, given.tensors)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    read: Bytes = {}
    figures: dict[str, Sequence[float]] = {}
    for samples, rounds in (
        (saves(comm, folder, state), given.rounds),
        (in_background(comm, folder, state), given.rounds),
        (loads(comm, folder, state, target, "cold", read), 2 * given.rounds),
        (loads(comm, folder, state, target, "warm", read), 2 * given.rounds),
        (first_tensors(comm, folder), given.rounds),
        (cold_checks(comm, folder, target), given.pairs),
    ):
        figures |= interleave(samples, comm, rounds=rounds, warmup=0).slowest(comm).figures
    dist.destroy_process_group()
    return Timings(figures), summed(comm, read)


def summed(comm: un.Communicator, read: Bytes) -> Bytes:
    """Return the bytes summed over all ranks."""
    counts = {name: torch.tensor(each) for name, each in read.items()}
    for each in counts.values():
        comm.all_reduce(each)
    return {name: each.tolist() for name, each in counts.items()}


def alone(comm: un.Communicator, way: Callable[[], object]) -> Callable[[], object]:
    """Return the call for rank 0 only, while the others wait."""
    return lambda: way() if comm.rank == 0 else None


def saves(comm: un.Communicator, folder: Path, state: State) -> dict[str, Sample]:
    ways = {
        "raw": alone(comm, lambda: raw(folder / "raw", state)),
        "torch": alone(comm, lambda: torch_save(folder / "torch", state)),
        "dcp": lambda: dcp.save(dict(state), checkpoint_id=folder / "dcp"),
        "ours": lambda: un.checkpoint.save(folder / "ours", state, comm),
    }
    return {f"save {name}": timed(way, comm, before=partial(clean, comm, folder / name)) for name, way in ways.items()}


def in_background(comm: un.Communicator, folder: Path, state: State) -> dict[str, Sample]:
    """Return samples of saves that return once the state may be changed, and of a clone of it."""
    path, running = folder / "background", list[Any]()

    def end() -> None:
        """Wait for the save by the library's own method; a clone needs no wait."""
        for way in ("wait", "result"):
            if hasattr(running[0], way):
                getattr(running[0], way)()
                break
        running.clear()
        clean(comm, path)

    ways = {
        "clone": lambda: running.append({key: tensor.clone() for key, tensor in state.items()}),
        "async dcp": lambda: running.append(dcp.async_save(dict(state), checkpoint_id=path)),
        "async ours": lambda: running.append(un.checkpoint.async_save(path, state, comm)),
    }
    return {name: timed(way, comm, after=end) for name, way in ways.items()}


def loads(
    comm: un.Communicator, folder: Path, state: State, target: State, caches: str, read: Bytes
) -> dict[str, Sample]:
    """Return samples of verified loads of the last saves; append the bytes that each read from disk to `read`."""
    ways = {
        "torch": alone(comm, lambda: copy(torch.load(folder / "torch"), target)),
        "dcp": lambda: dcp.load(target, checkpoint_id=folder / "dcp"),
        "ours": lambda: un.checkpoint.load(folder / "ours", target, comm),
        "unchecked": lambda: un.checkpoint.load(folder / "ours", target, comm, check=False),
    }

    def sample(name: str) -> Sample:
        path = folder / ("ours" if name == "unchecked" else name)
        label = f"load {name} {caches}"

        def before() -> None:
            for tensor in target.values():
                tensor.zero_()
            if caches == "cold" and comm.rank == 0:
                drop(path)
            read.setdefault(label, []).append(-from_disk())

        def after() -> None:
            read[label][-1] += from_disk()
            if comm.rank == 0 or name != "torch":
                assert all(torch.equal(target[key], tensor) for key, tensor in state.items()), name

        return timed(ways[name], comm, before=before, after=after)

    return {f"load {name} {caches}": sample(name) for name in ways}


def first_tensors(comm: un.Communicator, folder: Path) -> dict[str, Sample]:
    return {
        "first torch": timed(alone(comm, lambda: torch.load(folder / "torch")["t0"]), comm),
        "first ours": timed(alone(comm, lambda: un.checkpoint.open_archive(folder / "ours")["t0"]), comm),
    }


def cold_checks(comm: un.Communicator, folder: Path, target: State) -> dict[str, Sample]:
    """Return samples of checked and unchecked cold loads: only many show the cost of checks beside the disk's."""
    path = folder / "ours"
    return {
        f"pair {name}": timed(
            partial(un.checkpoint.load, path, target, comm, check=check), comm, before=alone(comm, lambda: drop(path))
        )
        for name, check in (("checked", True), ("unchecked", False))
    }


def copy(source: State, target: State) -> None:
    for key, tensor in source.items():
        target[key].copy_(tensor)


def report(timings: Timings) -> None:
    for name in timings.figures:
        times = timings.of(name) * 1e3
        print(f"{name:22} {times.median:10.2f} ms ({times.low:.2f} to {times.high:.2f})")
    # Meeting one of the first two bounds is enough.
    for what, first, second, bound, most in (
        ("save: torch.save / ours", "save torch", "save ours", 2, False),
        ("save: raw / ours", "save raw", "save ours", 0.8, False),
        ("save: ours / DCP", "save ours", "save dcp", 1, True),
        ("async_save: ours / a clone", "async ours", "clone", 1.3, True),
        ("async_save: ours / DCP", "async ours", "async dcp", 1, True),
        ("first tensor: torch.load / ours", "first torch", "first ours", 20, False),
        ("load, warm: ours / DCP", "load ours warm", "load dcp warm", 1, True),
        ("load, cold: ours / DCP", "load ours cold", "load dcp cold", 1, True),
        ("load, warm: checked / unchecked", "load ours warm", "load unchecked warm", 1.7, True),
        ("load, cold: checked / unchecked", "pair checked", "pair unchecked", 1.11, True),
    ):
        print(BoundCheck(what, timings.ratio(first, second), bound, most=most))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mib", type=int, default=512, help="of the state (%(default)s)")
    options.add_argument("--tensors", type=int, default=32, help="that it consists of (%(default)s)")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--pairs", type=int, default=20, help="of cold loads, checked and not (%(default)s)")
    options.add_argument("--backend", default="shm")
    options.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured (%(default)s)")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        timings, read = on_ranks(measure, given.ranks, given.backend, (Path(folder), given), timeout=900)[0]
    print(f"{given.mib} MiB in {given.tensors} tensors, {given.ranks} ranks ({given.backend}), {given.rounds} rounds")
    report(timings)
    ours, theirs = (
        Spread.of([count / (given.mib << 20) for count in read[f"load {name} cold"]]) for name in ("ours", "dcp")
    )
    print(BoundCheck("load, cold: ours, from the disk, times the state", ours, 1.01, most=True))
    print(f"        load, cold: dcp, from the disk, times the state: {theirs:.2f}")


if __name__ == "__main__":
    main()
