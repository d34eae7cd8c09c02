"""Groups of torch on unisono: many concurrent ones, life cycle, other devices, wrong arguments."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_ranks import message, on_ranks, summed

import unisono as un
from unisono.interop import GroupOptions, register
from unisono.interop.options import UnisonoWork


def test_registration_is_idempotent() -> None:
    before = list(dist.Backend.backend_list), dict(dist.Backend.backend_capability)
    register()
    assert (dist.Backend.backend_list, dist.Backend.backend_capability) == before
    assert dist.is_backend_available("unisono")
    assert dist.Backend.backend_capability["unisono"] == ["cpu"]


def names() -> list[object]:
    group = dist.group.WORLD
    return [dist.get_backend(), dist.get_backend_config(), group.group_name, group.group_desc, group.name()]


def test_torch_reports_the_backend(tmp_path: Path) -> None:
    expected = ["unisono", "cpu:unisono", "0", "default_pg", "unisono"]
    assert on_ranks(names, 2, tmp_path) == [expected, expected]


def many_groups() -> list[float]:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2], [0, 1, 2])]
    mine = [group for group in pairs if dist.get_rank(group) >= 0]
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(5) for group in mine]
    sums = [summed(group) for group in mine]
    for work in works:
        work.wait()
    alone, _ = dist.new_subgroups(group_size=1)
    dist.destroy_process_group(mine[0])
    return [*sums, summed(alone), summed()]


def test_many_groups_concurrently(tmp_path: Path) -> None:
    assert on_ranks(many_groups, 3, tmp_path) == [
        [11.0, 101.0, 111.0, 1.0, 111.0],
        [11.0, 110.0, 111.0, 10.0, 111.0],
        [110.0, 101.0, 111.0, 100.0, 111.0],
    ]


def communicators_beside_groups() -> list[Any]:
    part, seen = dist.new_group([0, 2]), []
    for group in (None, part) if dist.get_rank() != 1 else (None,):
        with un.Communicator.from_group(group, timeout=7.0) as comm:
            total = torch.ones(1)
            work = dist.all_reduce(torch.ones(9), group=group, async_op=True)
            comm.all_reduce(total)
            work.wait()
            seen.append((comm.backend, comm.rank, total.item()))
    return [*seen, summed()]


def test_from_group_makes_a_communicator_beside_the_group(tmp_path: Path) -> None:
    whole = [("shm", rank, 3.0) for rank in range(3)]
    assert on_ranks(communicators_beside_groups, 3, tmp_path) == [
        [whole[0], ("shm", 0, 2.0), 111.0],
        [whole[1], 111.0],
        [whole[2], ("shm", 1, 2.0), 111.0],
    ]


def groups_made_in_other_ways() -> list[Any]:
    rank = dist.get_rank()
    listed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    described = dist.new_group(timeout=timedelta(seconds=9), group_desc="for tests")
    # The last one: torch 2.15 counts it on the ranks that are in it alone, and no group of all can be made after it.
    local = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else dist.group.WORLD
    sums = [summed(listed), summed(local) if rank != 1 else 0.0]
    return [*sums, described.group_desc, dist.get_process_group_ranks(listed), summed(described)]


def test_groups_created_by_other_functions(tmp_path: Path) -> None:
    pair, alone = [101.0, 101.0, "for tests", [0, 2], 111.0], [10.0, 0.0, "for tests", [1], 111.0]
    assert on_ranks(groups_made_in_other_ways, 3, tmp_path) == [pair, alone, pair]


def two_threads() -> list[float]:
    """Each thread has a group of its own, and the two share a third for messages."""
    found: dict[str, float] = {}

    def work(name: str, group: Any, count: int) -> None:
        for _ in range(50):
            t = torch.ones(count)
            dist.all_reduce(t, group=group)
            dist.all_reduce(t, group=group, async_op=True).wait()
        found[name] = t[0].item()

    def talk(group: Any) -> None:
        t = torch.zeros(1)
        peer = 1 - dist.get_rank()
        for _ in range(20):
            works = [dist.isend(torch.ones(1), peer, group=group), dist.irecv(t, peer, group=group)]
            for each in works:
                each.wait()
        found["talk"] = t.item()

    groups = dist.group.WORLD, dist.new_group()
    threads = [
        threading.Thread(target=work, args=("small", groups[0], 10)),
        threading.Thread(target=work, args=("large", groups[1], 20_000)),
        threading.Thread(target=talk, args=(groups[0],)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found["small"], found["large"], found["talk"]]


def test_any_thread_may_call(tmp_path: Path) -> None:
    assert on_ranks(two_threads, 2, tmp_path) == [[4.0, 4.0, 1.0]] * 2


def objects() -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {rank: "x" * rank})
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    told = [rank, "of"]
    dist.broadcast_object_list(told, 1)
    own: list[Any] = [None]
    dist.scatter_object_list(own, [f"to {r}" for r in range(size)] if rank == 0 else None, 0)
    sent: list[Any] = [{"a": 1}, None] if rank == 0 else [None, 0]
    if rank == 0:
        dist.send_object_list(sent, 1)
    else:
        dist.recv_object_list(sent, 0)
    return [everybody, gathered, told, own, sent]


def test_object_collectives(tmp_path: Path) -> None:
    everybody = [{0: ""}, {1: "x"}]
    assert on_ranks(objects, 2, tmp_path) == [
        [everybody, [0, 1], [1, "of"], ["to 0"], [{"a": 1}, None]],
        [everybody, None, [1, "of"], ["to 1"], [{"a": 1}, None]],
    ]


def again_and_again(comm: un.Communicator, folder: str) -> list[float]:
    sums = []
    for number in range(3):
        method = f"file://{folder}/store {number}"
        dist.init_process_group("unisono", init_method=method, rank=comm.rank, world_size=comm.size)
        sums.append(summed())
        dist.destroy_process_group()
    return sums


def test_group_may_be_recreated(tmp_path: Path) -> None:
    assert un.launch(again_and_again, 2, "shm", (str(tmp_path),), timeout=20) == [[11.0] * 3] * 2


def alone() -> list[float]:
    t = torch.ones(2)
    dist.all_reduce(t)
    work = dist.all_reduce(t, async_op=True)
    assert work.is_completed()
    parts = [torch.zeros(2)]
    dist.all_gather(parts, t)
    dist.barrier()
    return [t.sum().item(), parts[0].sum().item()]


def test_single_rank(tmp_path: Path) -> None:
    assert on_ranks(alone, 1, tmp_path) == [[2.0, 2.0]]


# -- other devices ---------------------------------------------------------------------------------
class Elsewhere(dist.ProcessGroup):
    """A backend for another device, which notes what it is asked for."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.asked: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> UnisonoWork:
        self.asked.append("allreduce")
        return UnisonoWork(None, tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> UnisonoWork:
        self.asked.append("allgather")
        return UnisonoWork(None, outputs[0])

    def shutdown(self) -> None:
        NOTES.append([*self.asked, "shutdown"])


NOTES: list[list[str]] = []


def with_another_device(comm: un.Communicator, path: str) -> list[object]:
    dist.Backend.register_backend("elsewhere", lambda store, r, s, t: Elsewhere(r, s), devices=["meta"])
    backend = "cpu:unisono,meta:elsewhere"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    there = torch.ones(2, device="meta")
    dist.all_reduce(there)
    dist.all_reduce(there, async_op=True).wait()
    dist.all_gather([torch.empty(2, device="meta") for _ in range(2)], there)
    part = dist.new_group()
    dist.all_reduce(there, group=part)
    sums = [summed(), summed(part)]
    devices = [str(device) for device in dist.group.WORLD._device_types]
    dist.destroy_process_group()
    return [*sums, devices, sorted(NOTES, key=len)]


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="cloudpickle cannot send a process group's class of torch 2.9")
def test_other_device_uses_another_backend(tmp_path: Path) -> None:
    notes = [["allreduce", "shutdown"], ["allreduce", "allreduce", "allgather", "shutdown"]]
    expected = [11.0, 11.0, ["cpu", "meta"], notes]
    assert un.launch(with_another_device, 2, "shm", (str(tmp_path / "store"),), timeout=20) == [expected] * 2


# -- wrong arguments -------------------------------------------------------------------------------
def wrong() -> list[str]:
    ints = torch.ones(2, dtype=torch.int32)
    return [
        message(lambda: dist.group.WORLD.others.of(torch.device("xpu"))),
        message(lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))),
        message(lambda: dist.reduce(ints, 0, dist.ReduceOp.AVG)),
        message(lambda: dist.reduce(ints, 0, dist.ReduceOp.AVG, async_op=True).wait()),
        message(lambda: dist.all_gather([torch.ones(2)], torch.ones(2))),
        message(lambda: dist.all_reduce(torch.ones(1).expand(4))),
        message(lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(3))),
        message(lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(7))),
        message(lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2])),
        message(lambda: dist.isend(torch.ones(4), 1 - dist.get_rank(), tag=-1)),
        message(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank()))),
        message(dist.barrier),
    ]


def test_wrong_arguments_have_a_clear_error(tmp_path: Path) -> None:
    for said in on_ranks(wrong, 2, tmp_path):
        wanted = [
            "name a backend for it too",
            "no PREMUL_SUM",
            "avg of torch.int32",
            "avg of torch.int32",
            "one tensor for each of the 2 ranks",
            "share memory",
            "2 times the 3 elements",
            "2 times the 3 elements",
            "split sizes of output",
            "tags are 0 to",
            "MismatchError",
            "MismatchError",
        ]
        assert [text for text, part in zip(said, wanted, strict=True) if part not in text] == []


def wishes(comm: un.Communicator, path: str, transports: list[str]) -> str:
    options = GroupOptions(transports[comm.rank])
    return message(
        lambda: dist.init_process_group(
            "unisono", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size, pg_options=options
        )
    )


@pytest.mark.parametrize(
    ("transports", "said"),
    [(["shm", "gloo"], "MismatchError: .*rank 0: 'shm'; rank 1: 'gloo'"), (["glue"] * 2, "unknown transport 'glue'")],
)
def test_options_must_be_equal_and_known(tmp_path: Path, transports: list[str], said: str) -> None:
    for text in un.launch(wishes, 2, "shm", (str(tmp_path / "store"), transports), timeout=20):
        assert re.search(said, text), text
