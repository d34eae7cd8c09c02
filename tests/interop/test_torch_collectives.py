"""Every collective of torch.distributed gives on unisono what it gives on gloo, in the same ranks, bit for bit."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch_cases import CASES, size
from torch_ranks import on_ranks

from unisono.interop.options import UnisonoWork


def compare() -> dict[str, str]:
    """For each case, what is wrong with it, or nothing."""
    gloo = dist.new_group(backend="gloo")
    found = {}
    for name, function in CASES.items():
        expected, got = function(gloo), function(dist.group.WORLD)
        same = len(expected) == len(got) and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        found[name] = "" if same else f"rank {dist.get_rank()}: gloo gives {expected}, unisono {got}"
    return found


@pytest.fixture(
    scope="module", params=[(2, "shm"), (3, "shm"), (2, "gloo")], ids=lambda given: f"{given[0]}-{given[1]}"
)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    ranks, transport = request.param
    return on_ranks(compare, ranks, tmp_path_factory.mktemp("meet"), transport=transport)


@pytest.mark.parametrize("name", CASES)
def test_equals_gloo(compared: list[dict[str, str]], name: str) -> None:
    assert [found[name] for found in compared] == [""] * len(compared)


def beyond() -> list[list[float]]:
    rank = dist.get_rank()
    uneven = [torch.empty(r + 1) for r in range(2)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    taken = [torch.empty(2 * rank + r) for r in range(2)]
    dist.all_to_all(taken, [torch.full((2 * r + rank,), 10.0 * rank + r) for r in range(2)])
    stacked = torch.empty(2, 3)
    dist.all_gather_into_tensor(stacked, torch.full((3,), float(rank)))
    wide = torch.arange(6.0).view(3, 2)
    dist.all_reduce(wide[:, rank])
    lost = torch.tensor([float("nan") if rank else 1.0])
    dist.all_reduce(lost, dist.ReduceOp.MAX)
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    means = [torch.tensor([3 + rank, -3 - rank, 8]) for _ in range(2)]
    dist.all_reduce(means[0], dist.ReduceOp.AVG)
    dist.all_reduce(means[1], dist.ReduceOp.AVG, async_op=True).wait()
    tensors = [torch.cat(uneven), torch.cat(taken), stacked, wide, lost.isnan(), flags, torch.cat(means)]
    return [t.flatten().tolist() for t in tensors]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_differences_from_gloo(tmp_path: Path, transport: str) -> None:
    first, second = on_ranks(beyond, 2, tmp_path, transport=transport)
    assert first[0] == second[0] == [0.0, 1.0, 1.0]
    assert (first[1], second[1]) == ([10.0], [1.0, 1.0, 11.0, 11.0, 11.0])
    assert first[2] == second[2] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert (first[3], second[3]) == ([1.0, 1.0, 5.0, 3.0, 9.0, 5.0], [0.0, 1.0, 2.0, 5.0, 4.0, 9.0])
    assert first[4:] == second[4:] == [[True], [True, False], [3, -3, 8] * 2]


class Gathered(torch.autograd.Function):
    """Function like torch's own ones: its output gets a history after the call, and before that is done."""

    works: ClassVar[list[dist.Work]] = []

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor) -> torch.Tensor:
        row = mine.new_empty(size() * mine.numel())
        Gathered.works.append(dist.all_gather_into_tensor(row, mine, async_op=True))
        return row


def gets_a_history_meanwhile() -> list[float]:
    gate = threading.Event()
    dist.group.WORLD._queue.start(lambda: gate.wait(60.0))
    row = Gathered.apply(torch.full((2,), float(dist.get_rank()), requires_grad=True))
    assert row.grad_fn is not None
    gate.set()
    Gathered.works.pop().wait()
    return row.tolist()


def test_tensor_may_enter_autograd_during_its_call(tmp_path: Path) -> None:
    assert on_ranks(gets_a_history_meanwhile, 2, tmp_path) == [[0.0, 0.0, 1.0, 1.0]] * 2


def profiled(group: Any) -> list[tuple[str, list[list[int]]]]:
    """The events of some collectives in torch's profiler, without the backend's name, with what shapes they read."""
    rank, size, t = dist.get_rank(group), dist.get_world_size(group), torch.ones(4)
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(t, group=group)
        dist.all_reduce(t, group=group, async_op=True).wait()
        dist.broadcast(t, 0, group=group)
        dist.reduce(t, 0, group=group)
        dist.all_gather([torch.empty(4) for _ in range(size)], t, group=group)
        dist.all_gather_into_tensor(torch.empty(4 * size), t, group=group)
        dist.all_to_all_single(torch.empty(4), t, group=group)
        dist.scatter(t, [torch.ones(4) for _ in range(size)] if rank == 0 else None, 0, group=group)
        dist.gather(t, [torch.empty(4) for _ in range(size)] if rank == 0 else None, 0, group=group)
        dist.barrier(group)
    # The communicator below has events of its own, "unisono::all_reduce".
    events = [event for event in profile.events() if not event.name.startswith("unisono::")]
    parts = ((*event.name.partition(":"), event.input_shapes) for event in events)
    return sorted((name, shapes) for backend, _, name, shapes in parts if backend in ("gloo", "unisono"))


def both_profiled() -> tuple[object, object]:
    assert dist.group.WORLD is not None
    return profiled(dist.group.WORLD), profiled(dist.new_group(backend="gloo"))


def test_profiler_shows_collectives_as_on_gloo(tmp_path: Path) -> None:
    for ours, theirs in on_ranks(both_profiled, 2, tmp_path):
        assert ours == theirs
        assert ours.count(("all_reduce", [[4]])) == 2


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo], ids=str)
def test_works_can_be_dropped(layout: torch.layout, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(4) if layout is torch.strided else torch.ones(4).to_sparse()
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    work = UnisonoWork(None, [tensor])
    assert work.wait()
    del work
    # The youngest objects: all that exist take a second.
    gc.collect(1)
    assert not raised


def gathered_into_one() -> list[object]:
    """As `dist.gather_single` of torch 2.15 calls it."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    options = dist.GatherOptions()
    options.rootRank = 1
    mine = torch.full((2, 2), float(rank))
    found: list[object] = []
    for output in (torch.zeros(size(), 2, 2), torch.zeros(4 * size())):
        group.gather_single(output if rank == 1 else mine.new_empty(0), mine, options).wait()
        found.append(output.flatten().tolist())
    if rank == 1:
        for wrong in (torch.zeros(3), torch.zeros(4 * size(), 2)[:, 0]):
            with pytest.raises(ValueError, match=r"gather_tensor must be contiguous, with . times the 4 elements"):
                group.gather_single(wrong, mine, options)
    # Torch asks for these as if each backend had them.
    found.append(group.supports_reconfigure or group.supports_shrinking or group.use_pg_for_symm_mem_rendezvous)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers_into_one_tensor(tmp_path: Path, ranks: int) -> None:
    whole = [float(rank) for rank in range(ranks) for _ in range(4)]
    found = on_ranks(gathered_into_one, ranks, tmp_path)
    assert found[1] == [whole, whole, False]
    assert found[0] == [*[[0.0] * 4 * ranks] * 2, False]
