"""A program that crashes while it saves, again and again, and looks at what is left each time.

It forks, since a new interpreter would take seconds each time, and therefore needs a process without other threads.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

import unisono as un

CALLS = ("open", "write", "fsync", "close", "replace", "unlink", "mkdir", "rmdir", "preadv", "scandir")
SIZE = 3000


def state_of(number: int) -> dict[str, Any]:
    """Tensors that tell by each element of which save they are."""
    return {"w": torch.full((SIZE,), float(number)), "b": torch.full((7,), number), "step": number}


def in_shards(number: int, rank: int, ranks: int) -> dict[str, Any]:
    """The same, and a tensor of which each rank has a part."""
    start, stop = rank * SIZE // ranks, (rank + 1) * SIZE // ranks
    local = torch.full((stop - start,), float(number))
    return {**state_of(number), "shard": un.checkpoint.TensorShard(local, start, torch.Size([SIZE]))}


def number_in(path: Path) -> int:
    """Return the number of the save that a checkpoint holds; fails if it is incomplete."""
    state = un.checkpoint.load(path)
    assert torch.equal(state["w"], torch.full((SIZE,), float(state["step"]))), "mixed"
    assert torch.equal(state["shard"], state["w"]), "mixed"
    assert torch.equal(state["b"], torch.full((7,), state["step"])), "mixed"
    return int(state["step"])


def save(path: Path, number: int, ranks: int) -> None:
    if ranks == 1:
        un.checkpoint.save(path, in_shards(number, 0, 1))
    else:
        un.launch(
            lambda comm: un.checkpoint.save(path, in_shards(number, comm.rank, ranks), comm),
            ranks,
            "thread",
        )


def crash_at(call: int, half: bool) -> None:
    """End this process at its so-many-th system call; a write may be done by half before."""
    left = call

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if half and name == "write":
                    real(given[0], given[1][: len(given[1]) // 2])
                elif half:
                    real(*given, **options)
                os._exit(9)
            return real(*given, **options)

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def calls(folder: Path, ranks: int, count: int) -> dict[str, int]:
    """Crash at each call, or each `count`-th, of a save over an old one, and of a save to a new name."""
    found = {"crashes": 0, "old": 0, "new": 0}
    save(folder / "base", 1, ranks)
    for target in ("same", "fresh"):
        for half in (False, True):
            # Half of a call after the whole of another one, so that together they are dense.
            call = 1 - count + half % count
            finished = False
            while not finished:
                call += count
                shutil.rmtree(folder / "run", ignore_errors=True)
                shutil.copytree(folder / "base", folder / "run" / "same")
                before = names(folder / "run")
                path = folder / "run" / target

                def work(path: Path = path, call: int = call, half: bool = half) -> None:
                    crash_at(call, half)
                    save(path, 2, ranks)

                _, status = os.waitpid(child(work), 0)
                finished = os.waitstatus_to_exitcode(status) == 0
                newest = un.checkpoint.latest(folder / "run")
                assert newest is not None
                number = number_in(Path(newest))
                assert number == 2 if finished else number in (1, 2), (target, call, number)
                found["crashes"] += not finished
                found["new" if number == 2 else "old"] += 1
                # Leftovers of a crash do not affect later saves.
                save(path, 3, ranks)
                assert number_in(path) == 3
                assert len(names(path)) == ranks + 1, names(path)
                assert names(folder / "run") <= before | {target}
    return found


def kills(folder: Path, ranks: int, count: int) -> dict[str, int]:
    """Kill a process that saves over one name without end, at random instants."""
    chance = random.Random(7)
    found = {"crashes": 0, "saves": 0}
    path = folder / "name"
    save(path, 1, ranks)
    acknowledged = 1
    for _ in range(count):
        reader, writer = os.pipe()

        def work(first: int = acknowledged + 1, writer: int = writer) -> None:
            for number in range(first, first + 10_000):
                save(path, number, ranks)
                os.write(writer, number.to_bytes(8, "little"))

        pid = child(work)
        os.close(writer)
        said = os.read(reader, 8)
        # A random instant is meant: nothing is waited for.
        time.sleep(chance.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while more := os.read(reader, 8):
            said = more
        os.close(reader)
        last = int.from_bytes(said, "little")
        number = number_in(path)
        assert number in (last, last + 1), f"acknowledged {last}, found {number}"
        found["crashes"] += 1
        found["saves"] += last - acknowledged
        acknowledged = number
    return found


def die_while_saving(path: Path) -> None:
    un.checkpoint.save(path, {"n": torch.ones(3)}, progress=lambda *_: os._exit(3))


def forkserver() -> ForkServerContext:
    """The forkserver of the tests, whose processes have no other threads."""
    context = multiprocessing.get_context("forkserver")
    # It may start here, and ranks of later tests find what they need in it.
    context.set_forkserver_preload(["pytest", "unisono.launcher.preload"])
    return context


def crashes(folder: Path, *what: str) -> list[dict[str, int]]:
    """Crash as each of `calls:RANKS:EACH` and `kills:RANKS:COUNT` says; what was found."""
    torch.set_num_threads(1)
    found = []
    for number, (how, ranks, count) in enumerate(each.split(":") for each in what):
        place = folder / str(number)
        place.mkdir()
        found.append({"calls": calls, "kills": kills}[how](place, int(ranks), int(count)))
    return found
