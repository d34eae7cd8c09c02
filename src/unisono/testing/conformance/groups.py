"""Checks for sub-groups: each sub-group is independent, and works concurrently with its parent and siblings."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.testing.conformance.world import World, numbers, together, wait_all

__all__ = [
    "closing_a_subgroup_keeps_its_parent",
    "messages_of_parent_and_subgroup_are_separate",
    "nested_subgroups_work",
    "split_orders_ranks_by_key",
    "split_without_color_returns_none",
    "subgroups_run_concurrently",
]


def split_orders_ranks_by_key(world: World) -> None:
    """A sub-group orders its ranks by key, and its methods use the sub-group's rank numbers."""

    def program(comm: Communicator) -> tuple[int, list[float]]:
        part = comm.split(0, key=-comm.rank)
        got = [numbers(comm, -1) for _ in range(part.size)]
        part.all_gather(got, numbers(comm, comm.rank))
        return part.rank, [t.item() for t in got]

    found = world.run(program, size=3)
    assert found == [(2 - rank, [2, 1, 0]) for rank in range(3)], found


def split_without_color_returns_none(world: World) -> None:
    """`subgroup` keeps the listed order, and returns None on unlisted ranks, as `split` does for a color of None."""

    def program(comm: Communicator) -> tuple[int | None, int | None]:
        listed = comm.subgroup([3, 1])
        colored = comm.split(None if comm.rank == 0 else 5)
        for part in (listed, colored):
            if part is not None:
                together(part)
        return listed and listed.rank, colored and colored.rank

    found = world.run(program, size=4)
    assert found == [(None, None), (1, 0), (None, 1), (0, 2)], found


def subgroups_run_concurrently(world: World) -> None:
    """Sibling sub-groups run different collectives while a collective of their parent is in flight."""

    def program(comm: Communicator) -> tuple[list[float], list[float]]:
        part = comm.split(comm.rank % 2)
        whole = torch.full((3000,), 1.0, device=comm.device)
        work = comm.all_reduce(whole, algorithm="ring", async_op=True)
        mine = torch.full((2000,), float(comm.rank), device=comm.device)
        # One sub-group runs three collectives, the other only one.
        for _ in range(1 + 2 * (comm.rank % 2)):
            part.all_reduce(mine, "max", algorithm="ring")
        work.wait()
        together(comm)
        return whole.unique().tolist(), mine.unique().tolist()

    found = world.run(program, size=4)
    assert found == [([4], [2]), ([4], [3])] * 2, found


def messages_of_parent_and_subgroup_are_separate(world: World) -> None:
    """A receive gets its own group's message, even if a message of another group has the same ranks and tag."""

    def program(comm: Communicator) -> list[float]:
        first = comm.dup()
        second = comm.dup()
        groups = (comm, first, second)
        got = numbers(comm, -1, -1, -1)
        if comm.rank == 0:
            works = [group.isend(numbers(comm, n), 1) for n, group in enumerate(groups)]
        else:
            works = [groups[n].irecv(got[n], 0) for n in (2, 1, 0)]
        wait_all(works)
        return got.tolist()

    found = world.run(program)[1]
    assert found == [0, 1, 2], f"parent, part, part brought {found}"


def nested_subgroups_work(world: World) -> None:
    """Sub-groups nest to any depth; rank numbers refer to the communicator in use."""

    def program(comm: Communicator) -> float:
        back = comm.split(0, key=-comm.rank)
        half = back.split(back.rank // 2, key=-back.rank)
        total = numbers(comm, comm.rank)
        half.all_reduce(total)
        for group in (half, back, comm):
            together(group)
        return total.item()

    assert world.run(program, size=4) == [1, 1, 5, 5]


def closing_a_subgroup_keeps_its_parent(world: World) -> None:
    """After a sub-group is closed, its parent and siblings keep working, and the parent can be split again."""

    def program(comm: Communicator) -> None:
        first = comm.dup()
        second = comm.dup()
        first.close()
        for group in (second, comm, comm.dup()):
            together(group)

    world.run(program, size=3)
