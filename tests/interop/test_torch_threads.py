"""Ranks that are threads of one process, as in torchft's tests: the others notice one that ends, and go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pairwise import pairwise
from torch.utils._python_dispatch import TorchDispatchMode
from torch_ranks import message

from unisono.interop import GroupOptions
from unisono.interop.group import UnisonoGroup

SIZE = 3
# What ends a wait early is the report, not the clock: it takes milliseconds, and seconds where the host is overloaded.
TIMEOUT_S = 60.0
SOON_S = TIMEOUT_S / 2

Make = Callable[[str, int, int], UnisonoGroup]


def summed(group: UnisonoGroup) -> float:
    tensor = torch.tensor([10.0 ** group.rank()])
    group.allreduce([tensor]).wait()
    return tensor.item()


def use(group: UnisonoGroup) -> None:
    """All kinds of calls, whose works might hold the group."""
    assert summed(group) == 111.0
    group.barrier().wait()
    following, before = (group.rank() + 1) % SIZE, (group.rank() - 1) % SIZE
    received = torch.empty(1)
    works = [group.recv([received], before), group.send([torch.ones(1)], following)]
    assert [work.wait() for work in works] == [True, True]


def shut_down(group: UnisonoGroup) -> None:
    group.shutdown()


def abort(group: UnisonoGroup) -> None:
    group.abort()


def drop(group: UnisonoGroup) -> None:
    pass


def drop_with_a_message_under_way(group: UnisonoGroup) -> None:
    group.recv([torch.empty(1)], (group.rank() + 1) % SIZE, 7)


def fail(group: UnisonoGroup) -> None:
    raise KeyError("no such sample")


WAYS = (shut_down, abort, drop, drop_with_a_message_under_way, fail)


@pairwise(end=WAYS, lost=[0, SIZE - 1], transport=["shm", "gloo"])
def test_ended_thread_is_reported_to_the_others(end: Callable[[UnisonoGroup], None], lost: int, transport: str) -> None:
    store, used = dist.HashStore(), threading.Barrier(SIZE)

    def make(name: str, rank: int, size: int) -> UnisonoGroup:
        return UnisonoGroup(
            dist.PrefixStore(name, store), rank, size, timedelta(seconds=TIMEOUT_S), GroupOptions(transport)
        )

    def ends(rank: int) -> None:
        group = make("all", rank, SIZE)
        use(group)
        used.wait(TIMEOUT_S)
        end(group)

    def goes_on(rank: int) -> tuple[str, float, float]:
        group = make("all", rank, SIZE)
        use(group)
        used.wait(TIMEOUT_S)
        started = time.monotonic()
        said = message(lambda: summed(group))
        waited_s = time.monotonic() - started
        group.abort()
        smaller = make("survivors", rank - (rank > lost), SIZE - 1)
        total = summed(smaller)
        smaller.shutdown()
        return said, waited_s, total

    def program(rank: int) -> tuple[str, float, float]:
        if rank != lost:
            return goes_on(rank)
        with suppress(KeyError):
            ends(rank)
        return f"{'AbortedError' if end is abort else 'PeerLostError'}: ", 0.0, 11.0

    with ThreadPoolExecutor(SIZE) as threads:
        found = list(threads.map(program, range(SIZE)))
    kinds, waited_s, totals = zip(*found, strict=True)
    assert {said.split(":")[0] for said in kinds} == {"AbortedError" if end is abort else "PeerLostError"}
    assert f"rank {lost} " in kinds[1]
    assert max(waited_s) < SOON_S
    assert totals == (11.0,) * SIZE


class Names(TorchDispatchMode):
    """Mode that notes the operators of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [str(func)] if func.namespace == "c10d" else []
        return func(*args, **(kwargs or {}))


def test_modes_and_autograd_of_each_thread_see_its_calls() -> None:
    store = dist.HashStore()

    def ran(rank: int) -> list[object]:
        group = UnisonoGroup(store, rank, SIZE, timedelta(seconds=TIMEOUT_S), GroupOptions())
        saved = torch.ones(2, requires_grad=True)
        # What autograd has saved is changed, which torch's own backends do not tell it.
        activation = saved.relu()
        group.allreduce([activation]).wait()
        activation.sum().backward()
        with Names() as mode:
            group.broadcast(torch.ones(2), 0).wait()
            group.all_gather_single(torch.empty(2 * SIZE), torch.ones(2)).wait()
        group.shutdown()
        assert saved.grad is not None
        return [activation.tolist(), saved.grad.tolist(), mode.names[0], len(mode.names)]

    with ThreadPoolExecutor(SIZE) as threads:
        assert list(threads.map(ran, range(SIZE))) == [[[3.0, 3.0], [1.0, 1.0], "c10d.broadcast_.default", 2]] * SIZE
