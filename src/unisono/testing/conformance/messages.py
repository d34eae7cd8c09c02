"""Message checks: every message arrives once, in order, at its destination."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.core.types import Message, Recv, Send
from unisono.errors import MismatchError
from unisono.testing.conformance.world import World, numbers, together, wait_all
from unisono.testing.memory_layouts import LAYOUTS, place
from unisono.testing.reference import DTYPES

__all__ = [
    "batch_does_not_deadlock",
    "batch_keeps_its_order",
    "empty_messages_arrive",
    "every_dtype_arrives_bitwise",
    "long_messages_arrive",
    "messages_and_collectives_are_separate",
    "messages_of_one_tag_arrive_in_order",
    "messages_to_oneself_arrive",
    "peers_are_separate",
    "ranks_are_numbered",
    "receive_of_wrong_size_is_rejected",
    "receives_match_in_the_order_posted",
    "strided_messages_arrive",
    "tags_are_separate",
]

_MANY = 20


def ranks_are_numbered(world: World) -> None:
    """Each rank knows its number and the number of ranks."""
    for size in (1, 2, 4):
        found = world.run(lambda comm: (comm.rank, comm.size), size=size)
        assert found == [(rank, size) for rank in range(size)], found


def messages_of_one_tag_arrive_in_order(world: World) -> None:
    """Messages in flight at the same time are received in the order sent."""

    def program(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            wait_all([comm.isend(numbers(comm, n), 1) for n in range(_MANY)])
        got = numbers(comm, *[-1] * _MANY)
        if comm.rank == 1:
            for n in range(_MANY):
                comm.recv(got[n], 0)
        return got.tolist()

    found = world.run(program)[1]
    assert found == list(range(_MANY)), f"arrived in the order {found}"


def receives_match_in_the_order_posted(world: World) -> None:
    """Receives posted before any send match in posting order."""

    def program(comm: Communicator) -> list[float]:
        got = numbers(comm, *[-1] * _MANY)
        if comm.rank == 1:
            works = [comm.irecv(got[n], 0) for n in range(_MANY)]
            comm.send(numbers(comm, 0), 0)
            wait_all(works)
        else:
            comm.recv(numbers(comm, 0), 1)
            for n in range(_MANY):
                comm.send(numbers(comm, n), 1)
        return got.tolist()

    found = world.run(program)[1]
    assert found == list(range(_MANY)), f"arrived in the order {found}"


def tags_are_separate(world: World) -> None:
    """A receive gets the message with its tag, for any order of sends; a backend without tags raises an error."""

    def program(comm: Communicator) -> list[float] | str:
        tags = [0, 1, 7, 2**24 - 1]
        got = numbers(comm, *[-1] * len(tags))
        try:
            if comm.rank == 0:
                works = [comm.isend(numbers(comm, tag), 1, tag) for tag in tags]
            else:
                works = [comm.irecv(got[i], 0, tags[i]) for i in (2, 0, 3, 1)]
        except ValueError as error:
            return str(error)
        wait_all(works)
        return got.tolist()

    found = world.run(program)[1]
    if isinstance(found, str):
        assert "no tags" in found, found
    else:
        assert found == [0, 1, 7, 2**24 - 1], f"tags 0, 1, 7 and 2**24 - 1 brought {found}"


def peers_are_separate(world: World) -> None:
    """A receive gets its message from the rank that it names, even if another rank sent first."""

    def program(comm: Communicator) -> list[float]:
        got = numbers(comm, -1, -1, -1, -1)
        works = [comm.isend(numbers(comm, 10 * comm.rank + to), to) for to in range(comm.size) if to != comm.rank]
        for source in reversed(range(comm.size)):
            if source != comm.rank:
                comm.recv(got[source], source)
        wait_all(works)
        return got.tolist()

    for rank, found in enumerate(world.run(program, size=4)):
        wanted = [10 * source + rank if source != rank else -1 for source in range(4)]
        assert found == wanted, f"rank {rank} got {found}, not {wanted}"


def messages_and_collectives_are_separate(world: World) -> None:
    """A message not yet received never matches a collective, and a collective never matches a message."""

    def program(comm: Communicator) -> tuple[float, float, float]:
        early = numbers(comm, -1)
        late = numbers(comm, -1)
        total = numbers(comm, 1)
        if comm.rank == 0:
            waiting = comm.isend(numbers(comm, 5), 1)
        else:
            waiting = comm.irecv(early, 0)
            unsent = comm.irecv(late, 0)
        for algorithm in ("ring", "one_shot", None):
            comm.all_reduce(total, algorithm=algorithm)
        if comm.rank == 0:
            comm.send(numbers(comm, 6), 1)
        else:
            unsent.wait()
        waiting.wait()
        return early.item(), late.item(), total.item()

    found = world.run(program)
    assert found == [(-1, -1, 8), (5, 6, 8)], found


def batch_does_not_deadlock(world: World) -> None:
    """All ranks may send and receive more data than any buffer holds, at the same time."""

    def program(comm: Communicator) -> list[float]:
        count = 1 << 18
        sent = torch.full((count,), float(comm.rank), device=comm.device)
        got = torch.full((count,), -1.0, device=comm.device)
        comm.sendrecv(sent, (comm.rank + 1) % comm.size, got, (comm.rank - 1) % comm.size)
        return list(got.unique().tolist())

    found = world.run(program, size=4)
    assert found == [[3], [0], [1], [2]], found


def batch_keeps_its_order(world: World) -> None:
    """Messages to one rank in one batch arrive in the batch's order, even if the batch has messages to other ranks."""

    def program(comm: Communicator) -> list[list[float]]:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        got = {rank: numbers(comm, -1, -1, -1) for rank in others}
        batch: list[Message] = [Recv(got[rank][n : n + 1], rank) for n in range(3) for rank in others]
        batch += [Send(numbers(comm, 10 * comm.rank + n), rank) for n in range(3) for rank in others]
        wait_all(comm.batch_isend_irecv(batch))
        return [got[rank].tolist() for rank in others]

    for rank, found in enumerate(world.run(program, size=3)):
        wanted = [[10.0 * other + n for n in range(3)] for other in range(3) if other != rank]
        assert found == wanted, f"rank {rank} got {found}, not {wanted}"


def messages_to_oneself_arrive(world: World) -> None:
    """A rank's messages to itself are matched by tag and in order, as in a periodic halo exchange on few ranks."""

    def program(comm: Communicator) -> list[list[float]]:
        mine = comm.rank
        left = (comm.rank - 1) % comm.size
        right = (comm.rank + 1) % comm.size
        got = numbers(comm, -1, -1, -1, -1)
        batch: list[Message] = [Recv(got[0:1], right, 1), Recv(got[1:2], left, 2), Recv(got[2:3], mine, 0)]
        batch += [Send(numbers(comm, left), left, 1), Send(numbers(comm, right), right, 2)]
        batch += [Send(numbers(comm, 10 * mine), mine, 0)]
        wait_all(comm.batch_isend_irecv(batch))
        works = [comm.isend(numbers(comm, n), mine, n % 2) for n in range(4)]
        turned = numbers(comm, -1, -1, -1, -1)
        for index, tag in enumerate((1, 1, 0, 0)):
            comm.recv(turned[index], mine, tag)
        wait_all(works)
        count = 1 << 18
        sent = torch.full((count,), float(mine), device=comm.device)
        back = torch.full((count,), -1.0, device=comm.device)
        comm.sendrecv(sent, mine, back, mine)
        return [got[:3].tolist(), turned.tolist(), back.unique().tolist()]

    for size in (1, 2, 3):
        for rank, found in enumerate(world.run(program, size=size)):
            wanted = [[rank, rank, 10.0 * rank], [1, 3, 0, 2], [rank]]
            assert found == wanted, f"rank {rank} of {size} got {found}, not {wanted}"


def empty_messages_arrive(world: World) -> None:
    """An empty message is delivered like any other: it arrives in order, and its receiver waits for it."""

    def program(comm: Communicator) -> float:
        got = numbers(comm, -1)
        for tensor in (numbers(comm), numbers(comm, comm.rank), numbers(comm)):
            if comm.rank == 0:
                comm.send(tensor, 1)
            else:
                comm.recv(got if tensor.numel() else tensor, 0)
        work = comm.isend(numbers(comm), 1) if comm.rank == 0 else comm.irecv(numbers(comm), 0)
        work.wait()
        return got.item()

    assert world.run(program)[1] == 0


def every_dtype_arrives_bitwise(world: World) -> None:
    """Every bit pattern, including all kinds of NaN, arrives as sent."""

    def program(comm: Communicator) -> list[str]:
        changed = []
        for dtype in DTYPES:
            pattern = torch.randint(256, (64 * dtype.itemsize,), generator=torch.Generator().manual_seed(0))
            bits = (pattern % 2 if dtype is torch.bool else pattern).to(torch.uint8).to(comm.device)
            if comm.rank == 0:
                comm.send(bits.view(dtype), 1)
            else:
                got = torch.zeros(64, dtype=dtype, device=comm.device)
                comm.recv(got, 0)
                changed += [] if torch.equal(got.view(torch.uint8), bits) else [str(dtype)]
        return changed

    changed = world.run(program)[1]
    assert not changed, f"bits have changed of {', '.join(changed)}"


def long_messages_arrive(world: World) -> None:
    """Messages whose lengths are near the backends' thresholds arrive intact."""

    def program(comm: Communicator) -> list[int]:
        wrong = []
        for count in (1023, 1024, 1025, (1 << 14) + 1, (1 << 20) + 3):
            sent = torch.arange(count, dtype=torch.int32, device=comm.device)
            got = torch.full_like(sent, -1)
            if comm.rank == 0:
                comm.send(sent, 1)
            else:
                comm.recv(got, 0)
                wrong += [] if torch.equal(got, sent) else [count]
        return wrong

    wrong = world.run(program)[1]
    assert not wrong, f"messages of {wrong} elements were corrupted"


def strided_messages_arrive(world: World) -> None:
    """Sender and receiver may pass any kinds of views, even different kinds; bytes outside the views are untouched."""

    def program(comm: Communicator) -> list[str]:
        wrong = []
        values = torch.arange(12.0) * (1 + 2j)
        for layout in LAYOUTS:
            for other in (layout, "every second"):
                sent = place(values.to(comm.device), layout)
                got = place(torch.zeros_like(values, device=comm.device), other)
                if comm.rank == 0:
                    comm.send(sent.view, 1)
                else:
                    comm.recv(got.view, 0)
                    wrong += [] if torch.equal(got.values(), values) else [f"{layout} to {other}: wrong numbers"]
                wrong += [f"{layout} to {other}: wrote outside"] if sent.guard_bytes() or got.guard_bytes() else []
        return wrong

    wrong = [text for found in world.run(program) for text in found]
    assert not wrong, "; ".join(wrong)


def receive_of_wrong_size_is_rejected(world: World) -> None:
    """A length or dtype that differs from the sender's raises `MismatchError` on the receiver; no process dies."""

    def program(comm: Communicator, sent: int, count: int, dtype: torch.dtype) -> str:
        part = comm.dup()
        try:
            if part.rank == 0:
                # The send may also fail with `MismatchError`, unless it has already completed.
                part.isend(torch.ones(sent, device=comm.device), 1)
            else:
                part.recv(torch.zeros(count, dtype=dtype, device=comm.device), 0)
        except MismatchError as error:
            return str(error)
        finally:
            together(comm)
        return "nothing"

    floats = torch.float32
    ints = torch.int32
    for sent, count, dtype in ((4, 3, floats), (4, 5, floats), (4, 5000, floats), (5000, 4, floats), (4, 4, ints)):
        text = world.run(program, sent, count, dtype)[1]
        assert f"rank 0 sent {sent}" in text, f"a receive of {count} {dtype} for {sent} of float32 raised: {text}"
