"""Transports made of two: which ranks go which way, what crosses between hosts, and names."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from insides import transport_of

import unisono as un
from unisono.core.types import Message, Send, Work
from unisono.errors import ClosedError, UnavailableError
from unisono.testing import run_ranks
from unisono.transports.hierarchical import TransportPair, transport_named
from unisono.transports.hierarchical.collectives import HierarchicalCollectives
from unisono.transports.hierarchical.composed import Hierarchical
from unisono.transports.thread import ThreadTransport

Hosts = tuple[tuple[int, ...], ...]
UNEVEN: list[Hosts] = [((0, 1, 2), (3, 4)), ((0,), (1, 2, 3, 4)), ((4, 0), (1, 3), (2,)), ((0, 2, 4), (1, 3, 5))]


def everything(comm: un.Communicator, count: int) -> dict[str, Any]:
    """Whole numbers, so that each result is exact, whatever the order of additions."""
    rank, size = comm.rank, comm.size
    mine = torch.arange(count) * (rank + 1)
    found: dict[str, Any] = {"kind": type(transport_of(comm)).__name__}
    total = mine.clone()
    comm.all_reduce(total)
    found["all_reduce"] = total.tolist()
    for root in range(size):
        got = mine.clone()
        comm.broadcast(got, root)
        found[f"broadcast {root}"] = got.tolist()
        comm.reduce(got := mine.clone(), root)
        found[f"reduce {root}"] = got.tolist() if rank == root else None
    gathered = [torch.empty_like(mine) for _ in range(size)]
    comm.all_gather(gathered, mine)
    found["all_gather"] = [t.tolist() for t in gathered]
    part = torch.empty(count, dtype=torch.int64)
    comm.reduce_scatter(part, [mine + 1000 * to for to in range(size)])
    found["reduce_scatter"] = part.tolist()
    return found


@pytest.mark.parametrize("hosts", UNEVEN, ids=str)
@pytest.mark.parametrize("count", [3, 3000])
def test_any_number_of_ranks_per_host(hosts: Hosts, count: int) -> None:
    size = sum(map(len, hosts))
    for rank, found in enumerate(run_ranks(everything, size, "thread+thread", count, hosts=hosts, chunk_bytes=4096)):
        numbers = torch.arange(count)
        factor = size * (size + 1) // 2
        assert found["kind"] == "Hierarchical"
        assert found["all_reduce"] == (numbers * factor).tolist()
        assert found["all_gather"] == [(numbers * (r + 1)).tolist() for r in range(size)]
        assert found["reduce_scatter"] == (numbers * factor + 1000 * rank * size).tolist()
        for root in range(size):
            assert found[f"broadcast {root}"] == (numbers * (root + 1)).tolist()
        assert found[f"reduce {rank}"] == (numbers * factor).tolist()


def test_single_transport_is_used_directly() -> None:
    def program(comm: un.Communicator) -> tuple[str, un.Communicator | None]:
        half = comm.split(comm.rank // 2)
        kinds = [type(transport_of(part)) for part in (comm, half, comm.split(comm.rank % 2))]
        return [Hierarchical in kind.__mro__ for kind in kinds], half.hosts

    found = run_ranks(program, 4, "thread+thread", hosts=[[0, 1], [2, 3]])
    assert found == [([True, False, False], ((0, 1),))] * 4
    for hosts in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        found = run_ranks(program, 4, "thread+thread", hosts=hosts)
        assert [kinds for kinds, _ in found] == [[False] * 3] * 4


def crossing(monkeypatch: pytest.MonkeyPatch, hosts: Hosts, call: str, count: int) -> list[int]:
    """Bytes that each host sends to the others, for one call on `count` bytes."""
    sent: Counter[int] = Counter()
    post = ThreadTransport.post

    def counting(self: ThreadTransport, batch: list[Message]) -> Work:
        if self.group.name.endswith("between hosts"):
            here = next(ranks for ranks in hosts if self.rank in ranks)
            for message in batch:
                assert message.peer not in here, "what is for this host goes between hosts"
                if isinstance(message, Send):
                    sent[here[0]] += message.tensor.nbytes
        return post(self, batch)

    def program(comm: un.Communicator) -> None:
        tensor = torch.ones(count, dtype=torch.uint8)
        if call == "all_reduce":
            comm.all_reduce(tensor, "max")
        elif call == "broadcast":
            comm.broadcast(tensor, 1)
        elif call == "all_gather":
            comm.all_gather([torch.empty_like(tensor) for _ in range(comm.size)], tensor)
        else:
            comm.reduce_scatter(tensor[: count // comm.size], list(tensor.split(count // comm.size)))

    with monkeypatch.context() as patch:
        patch.setattr(ThreadTransport, "post", counting)
        run_ranks(program, sum(map(len, hosts)), "thread+thread", hosts=hosts)
    return [sent[ranks[0]] for ranks in hosts]


def test_data_crosses_between_hosts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    two, four, uneven = ((0, 1), (2, 3)), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2), (3,))
    whole = 1 << 20
    for hosts in (two, four, uneven):
        # 2(N-1)/N of the message, of which a ring over all ranks sends 2(p-1)/p.
        assert crossing(monkeypatch, hosts, "all_reduce", whole) == [whole, whole]
        assert crossing(monkeypatch, hosts, "broadcast", whole) == [whole, 0]
    assert crossing(monkeypatch, two, "all_gather", whole) == [2 * whole, 2 * whole]
    assert crossing(monkeypatch, two, "reduce_scatter", whole) == [whole // 2, whole // 2]
    three = ((0, 1), (2, 3), (4, 5))
    most = 4 / 3 * whole
    assert all(sent <= most * 1.01 for sent in crossing(monkeypatch, three, "all_reduce", whole))


def test_call_ends_if_the_transport_closes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    scattered = HierarchicalCollectives._scattered
    tiles: Counter[int] = Counter()

    def closing(self: HierarchicalCollectives, *args: Any) -> torch.Tensor:
        rank = self._outer.rank
        tiles[rank] += 1
        if tiles[rank] == 2:
            self.worker.end()
        return scattered(self, *args)

    def program(comm: un.Communicator) -> None:
        with pytest.raises(ClosedError, match="the communicator is closed"):
            comm.all_reduce(torch.ones(1 << 14))

    monkeypatch.setattr(HierarchicalCollectives, "_scattered", closing)
    run_ranks(program, 4, "thread+thread", hosts=[[0, 1], [2, 3]], chunk_bytes=4096, timeout=5)


SEVERAL_PROGRAMS = """
import threading
import torch, unisono as un

def program(comm):
    found = []
    for _ in range(2):
        comm.all_reduce(total := torch.ones(100_000))
        found.append(total.unique().tolist())
    return found

for backend in ("thread+thread", "sim+sim", "sim+sim"):
    assert un.launch(program, 4, backend, hosts=[[0, 1], [2, 3]], chunk_bytes=1 << 15) == [[[4.0], [4.0]]] * 4

for thread in threading.enumerate():
    if thread.name == "unisono between hosts":
        thread.join(2.0)
        assert not thread.is_alive()
"""


def test_simulated_hosts_use_no_thread_of_an_earlier_program() -> None:
    # A new interpreter, in which the exchanges of the first program start their threads.
    subprocess.run([sys.executable, "-c", SEVERAL_PROGRAMS], check=True, timeout=300)


def test_pair_has_a_name() -> None:
    assert transport_named("shm+gloo") == TransportPair("shm", "gloo")
    assert transport_named("thread") is ThreadTransport
    for wrong, unknown in (("shm+", "''"), ("+gloo", "''"), ("shm+glue", "'glue'"), ("a+b", "'a'"), ("x+y+z", "'x'")):
        with pytest.raises(ValueError, match=f"unknown transport {unknown}; known: .*gloo"):
            un.init(wrong)


def test_invalid_hosts_are_rejected() -> None:
    for wrong in ([[0, 1]], [[0, 1], [1, 2]], [[0], [1], [2, 3]], [[0, 1, 2], []]):
        with pytest.raises(ValueError, match="hosts must name each of the ranks 0 to 2 once"):
            un.launch(lambda comm: None, 3, "thread", hosts=wrong)


def test_pairs_without_a_common_device_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = frozenset({"cuda"})
    split = ThreadTransport.connect.__func__  # type: ignore[attr-defined]  # not in the annotations of what it is

    def connect(cls: type[ThreadTransport], group: Any, control: Any, options: Any) -> ThreadTransport:
        made: ThreadTransport = split(cls, group, control, options)
        made.devices = devices if group.name.endswith("between hosts") else frozenset({"cpu"})
        return made

    monkeypatch.setattr(ThreadTransport, "connect", classmethod(connect))
    with pytest.raises(UnavailableError, match=r"supports tensors on cpu, .* on cuda; use two backends"):
        run_ranks(lambda comm: None, 3, "thread+thread", hosts=[[0, 1], [2]])


def test_training_step_overlaps_inter_host_traffic() -> None:
    def program(comm: un.Communicator) -> tuple[bool, list[float]]:
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(model.weight)
        averager = un.GradientAverager(model, comm)
        model(torch.full((1, 4), comm.rank + 1.0)).sum().backward()
        averager.remove()
        assert model.weight.grad is not None
        return comm.overlaps, model.weight.grad.unique().tolist()

    assert run_ranks(program, 4, "thread+thread", hosts=[[0, 1], [2, 3]]) == [(True, [2.5])] * 4
