"""Agreement checks: if the ranks' calls do not match, all ranks get a `MismatchError`, and no rank hangs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unisono.communicator import Communicator
from unisono.testing.conformance.world import Raised, World, numbers, raised, together

__all__ = ["different_calls_are_rejected_on_every_rank"]


def different_calls_are_rejected_on_every_rank(world: World) -> None:
    """The error quotes any difference in count, dtype, op, root, operation, algorithm, lengths or order of calls."""
    for difference, (call, quoted) in _DIFFERENCES.items():
        for rank, error in enumerate(world.run(_program, call, size=3)):
            assert "MismatchError" in error.kinds, f"ranks differ in {difference}; rank {rank} raised {error}"
            missing = [word for word in quoted if word not in error.text]
            assert not missing, f"ranks differ in {difference}; rank {rank}'s error lacks {missing}: {error.text}"


def _program(comm: Communicator, call: Callable[[Communicator, bool], object]) -> Raised:
    part = comm.dup()
    # Rank 1's call differs from the other two ranks' calls.
    error = raised(lambda: call(part, part.rank == 1))
    together(comm)
    return error


def _sizes(comm: Communicator, odd: bool) -> object:
    rows = [comm.rank] * 3
    got = torch.zeros(sum(range(3)) + odd, device=comm.device)
    return comm.all_to_all_single(got, torch.zeros(3 * comm.rank, device=comm.device), [0, 1, 2 + odd], rows)


def _lengths(comm: Communicator, odd: bool) -> object:
    got = [torch.zeros(3 if odd and rank == 0 else 2, device=comm.device) for rank in range(3)]
    return comm.all_gather(got, numbers(comm, 0, 0))


def _calls(comm: Communicator, odd: bool) -> object:
    if not odd:
        comm.broadcast(numbers(comm, 1), 0)
    return comm.all_reduce(numbers(comm, 1))


_DIFFERENCES: dict[str, tuple[Callable[[Communicator, bool], object], tuple[str, ...]]] = {
    "count": (
        lambda comm, odd: comm.all_reduce(torch.zeros(5 if odd else 4, device=comm.device)),
        ("counts", "rank 1", "4 elements", "5 elements"),
    ),
    "dtype": (
        lambda comm, odd: comm.all_reduce(numbers(comm, 1, dtype=torch.int32 if odd else torch.float32)),
        ("dtype", "int32", "float32"),
    ),
    "op": (lambda comm, odd: comm.all_reduce(numbers(comm, 1), "max" if odd else "sum"), ("op", "max", "sum")),
    "root": (lambda comm, odd: comm.broadcast(numbers(comm, 1), 2 if odd else 0), ("root", "root 2", "root 0")),
    "operation": (
        lambda comm, odd: comm.all_reduce(numbers(comm, 1)) if odd else comm.broadcast(numbers(comm, 1), 0),
        ("operation", "all_reduce", "broadcast"),
    ),
    "the order of calls": (_calls, ("operation", "all_reduce", "broadcast")),
    "algorithm": (
        lambda comm, odd: comm.all_reduce(numbers(comm, 1), algorithm="ring" if odd else "one_shot"),
        ("algorithm", "ring", "one_shot"),
    ),
    "rows of all_to_all": (_sizes, ("rank 2", "rank 1", "2", "3")),
    "lengths of all_gather": (_lengths, ("counts", "rank 1")),
}
