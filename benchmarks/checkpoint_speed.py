"""What does a checkpoint cost: save, async_save and load beside torch.save with fsync, DCP, and raw writing?

Answer (2 ranks, 2 cores): see docs/benchmarks.md; run it to see yours, on the disk that you mean:

    python benchmarks/checkpoint_speed.py [--mib 512] [--tensors 32] [--ranks 2] [--rounds 4] [--pairs 20]

All ways take turns in one run, on the same state and disk. Files are removed and the disk is synced between them,
outside the clock. A time is from when all ranks begin to when the last one ends. Cold is a load after the
files' pages were dropped from memory; what was then read from the disk is what the kernel counts for all ranks.
Whether checks cost anything then is asked by loads of its own, `--pairs` of them, for the disk varies by more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import unisono as un

State = dict[str, torch.Tensor]


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
    """Take the pages of all files out of memory."""
    os.sync()
    for file in [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def from_disk() -> int:
    """Bytes that this process has had read from disks; 0 where nobody counts them."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split("read_bytes: ")[1].split()[0]) if counts.exists() else 0


class Clock:
    """Times of ways by name, each from all ranks' start to the last one's end; and what all ranks read from disks."""

    def __init__(self, comm: un.Communicator) -> None:
        self.comm = comm
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, list[int]] = {}

    def time(self, name: str, way: Callable[[], object]) -> None:
        self.comm.barrier()
        began, read = time.perf_counter(), from_disk()
        way()
        taken, come = torch.tensor([time.perf_counter() - began]), torch.tensor([from_disk() - read])
        self.comm.all_reduce(taken, "max")
        self.comm.all_reduce(come)
        self.seconds.setdefault(name, []).append(taken.item())
        self.bytes.setdefault(name, []).append(int(come.item()))


def clean(comm: un.Communicator, *paths: Path) -> None:
    comm.barrier()
    if comm.rank == 0:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.sync()
    comm.barrier()


def measure(
    comm: un.Communicator, name: str, given: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    warnings.simplefilter("ignore")
    folder = Path(name)
    state = make(given.mib, given.tensors)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    clock = Clock(comm)
    for number in range(given.rounds):
        saves(clock, folder, state, turned=number % 2 == 1)
        loads(clock, folder, state, target)
        clean(comm, *(folder / path for path in ("raw", "torch", "dcp", "ours")))
    un.checkpoint.save(folder / "ours", state, comm)
    for number in range(given.pairs):
        cold_checks(clock, folder, target, turned=number % 2 == 1)
    dist.destroy_process_group()
    return clock.seconds, clock.bytes


def alone(comm: un.Communicator, way: Callable[[], object]) -> Callable[[], object]:
    """On rank 0, while the others wait."""
    return lambda: way() if comm.rank == 0 else None


def saves(clock: Clock, folder: Path, state: State, *, turned: bool) -> None:
    comm, running = clock.comm, list[object]()
    ways = {
        "raw": alone(comm, lambda: raw(folder / "raw", state)),
        "torch": alone(comm, lambda: torch_save(folder / "torch", state)),
        "dcp": lambda: dcp.save(dict(state), checkpoint_id=folder / "dcp"),
        "ours": lambda: un.checkpoint.save(folder / "ours", state, comm),
    }
    for name in reversed(ways) if turned else ways:
        clean(comm, folder / name)
        clock.time(f"save {name}", ways[name])
    clock.time("clone", lambda: running.append({key: tensor.clone() for key, tensor in state.items()}))
    running.clear()
    clean(comm, folder / "background")
    clock.time("async dcp", lambda: running.append(dcp.async_save(dict(state), checkpoint_id=folder / "background")))
    running.pop().result()  # type: ignore[attr-defined]  # not in the annotations of what it is
    clean(comm, folder / "background")
    clock.time("async ours", lambda: running.append(un.checkpoint.async_save(folder / "background", state, comm)))
    running.pop().wait()  # type: ignore[attr-defined]  # not in the annotations of what it is
    clean(comm, folder / "background")


def loads(clock: Clock, folder: Path, state: State, target: State) -> None:
    comm = clock.comm
    files = {"torch": folder / "torch", "dcp": folder / "dcp", "ours": folder / "ours", "unchecked": folder / "ours"}
    ways = {
        "torch": alone(comm, lambda: copy(torch.load(folder / "torch"), target)),
        "dcp": lambda: dcp.load(target, checkpoint_id=folder / "dcp"),
        "ours": lambda: un.checkpoint.load(folder / "ours", target, comm),
        "unchecked": lambda: un.checkpoint.load(folder / "ours", target, comm, check=False),
    }
    for warmth, turned in (("cold", False), ("cold", True), ("warm", False), ("warm", True)):
        for name, way in reversed(ways.items()) if turned else ways.items():
            for tensor in target.values():
                tensor.zero_()
            if warmth == "cold" and comm.rank == 0:
                drop(files[name])
            clock.time(f"load {name} {warmth}", way)
            if comm.rank == 0 or name != "torch":
                assert all(torch.equal(target[key], tensor) for key, tensor in state.items()), name
    clock.time("first torch", alone(comm, lambda: torch.load(folder / "torch")["t0"]))
    clock.time("first ours", alone(comm, lambda: un.checkpoint.open(folder / "ours")["t0"]))


def cold_checks(clock: Clock, folder: Path, target: State, *, turned: bool) -> None:
    """Of one load with a cold cache the disk decides how long it takes; of many, whether it is checked."""
    ways: dict[str, bool] = {"checked": True, "unchecked": False}
    for name in reversed(ways) if turned else ways:
        if clock.comm.rank == 0:
            drop(folder / "ours")
        clock.time(f"pair {name}", partial(un.checkpoint.load, folder / "ours", target, clock.comm, check=ways[name]))


def copy(source: State, target: State) -> None:
    for key, tensor in source.items():
        target[key].copy_(tensor)


def ratio(seconds: dict[str, list[float]], first: str, second: str) -> str:
    pairs = sorted(a / b for a, b in zip(seconds[first], seconds[second], strict=True))
    return f"{statistics.median(pairs):6.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})"


def report(seconds: dict[str, list[float]]) -> None:
    for name, times in seconds.items():
        print(f"{name:22} {statistics.median(times) * 1e3:10.2f} ms ({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f})")
    questions = [
        ("save: torch.save / ours", "save torch", "save ours", "at least 2, or the next at least 0.8"),
        ("save: raw / ours", "save raw", "save ours", "at least 0.8, or the one before at least 2"),
        ("save: ours / DCP", "save ours", "save dcp", "at most 1"),
        ("async_save: ours / a clone", "async ours", "clone", "at most 1.3"),
        ("async_save: ours / DCP", "async ours", "async dcp", "at most 1"),
        ("first tensor: torch.load / ours", "first torch", "first ours", "at least 20"),
        ("load, warm: ours / DCP", "load ours warm", "load dcp warm", "at most 1"),
        ("load, cold: ours / DCP", "load ours cold", "load dcp cold", "at most 1"),
        ("load, warm: checked / unchecked", "load ours warm", "load unchecked warm", "at most 1.7"),
        ("load, cold: checked / unchecked", "pair checked", "pair unchecked", "at most 1.11"),
    ]
    for text, first, second, wanted in questions:
        print(f"{text:34} {ratio(seconds, first, second)}; wanted: {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of the state (%(default)s)")
    parser.add_argument("--tensors", type=int, default=32, help="that it consists of (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20, help="of cold loads, checked and not (%(default)s)")
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = un.launch(measure, given.ranks, given.backend, (folder, given), threads=1, timeout=900)
    print(f"{given.mib} MiB in {given.tensors} tensors, {given.ranks} ranks ({given.backend}), {given.rounds} rounds")
    seconds, come = found[0]
    report(seconds)
    for name, wanted in (("ours", "at most 1.01"), ("dcp", "nothing")):
        share = statistics.median(come[f"load {name} cold"]) / (given.mib << 20)
        print(f"{f'load, cold: {name}, from the disk':34} {share:6.2f} times the state; wanted: {wanted}")


if __name__ == "__main__":
    main()
