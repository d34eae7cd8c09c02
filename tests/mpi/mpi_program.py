"""Program of each rank of the job of test_mpi_world.py: it runs many checks, and prints their results."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

import unisono as un
from unisono.transports.mpi import collectives, requests
from unisono.transports.shm import segment

torch.set_num_threads(1)


def bootstraps() -> dict[str, Any]:
    """Every backend under mpirun, one after another."""
    found = {}
    for backend in ("gloo", "shm", "auto", "mpi"):
        with un.init(backend, timeout=60) as comm:
            total = torch.tensor([1.0, comm.rank])
            comm.all_reduce(total)
            found[backend] = (comm.rank, comm.size, comm.backend, comm.hosts, total.tolist())
    with un.init("mpi", init_method="mpi://", timeout=60) as comm:
        found["mpi://"] = (comm.rank, comm.size)
    # As if each rank were on a host of its own.
    with patch.object(segment, "why_no_shm", lambda: "an obstacle"), un.init(timeout=60) as comm:
        found["apart"] = comm.backend
    return found


def local_rank() -> int | None:
    place = un.bootstrap.find(timeout_s=60) if hasattr(un, "bootstrap") else _find()
    number = place.local_rank
    place.close()
    return number


def _find() -> Any:
    from unisono import bootstrap

    return bootstrap.find(timeout_s=60)


def adopted() -> dict[str, Any]:
    """The user's own communicators: the world, one in reverse order, and each rank alone."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    got, found = bytearray(4), {}
    # The owner's messages are under way meanwhile, of any tag.
    waiting = world.Irecv([got, MPI.BYTE], (world.rank + 1) % world.size, MPI.ANY_TAG)
    backwards = world.Split(0, -world.rank)
    for name, comm in {"world": world, "backwards": backwards, "alone": MPI.COMM_SELF}.items():
        with un.Communicator.from_mpi(comm, timeout=60) as made:
            values = [torch.zeros(1, dtype=torch.int64) for _ in range(made.size)]
            made.all_gather(values, torch.tensor([world.rank]))
            part = made.split(made.rank, 0)
            part.barrier()
            found[name] = (made.rank, made.size, [v.item() for v in values], part.size)
    world.Send([b"mine", MPI.BYTE], (world.rank - 1) % world.size, 5)
    waiting.Wait()
    # It is still its owner's.
    backwards.Barrier()
    backwards.Free()
    return {**found, "owner's": got.decode()}


def refused() -> list[str]:
    from mpi4py import MPI

    said = []
    for wrong in ("world", MPI.COMM_NULL):
        try:
            un.Communicator.from_mpi(wrong)
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def reductions() -> dict[str, str]:
    """Sums that MPI forms wrongly, and what it does not know: "right", or what came instead."""
    found = {}
    with un.init("mpi", timeout=60) as comm:
        pair = comm.size
        for name, tensor, op, wanted in (
            ("int16 wraps", torch.full((2049,), 20000, dtype=torch.int16), "sum", pair * 20000),
            ("int8 wraps", torch.full((100,), 100, dtype=torch.int8), "sum", pair * 100),
            ("uint8 wraps", torch.full((100,), 200, dtype=torch.uint8), "sum", pair * 200),
            ("bfloat16", torch.full((33,), 1.5, dtype=torch.bfloat16), "sum", pair * 1.5),
            ("float16", torch.full((33,), 2.0, dtype=torch.float16), "product", 2.0**pair),
            ("bool", torch.tensor([comm.rank == 0]), "sum", True),
        ):
            comm.all_reduce(tensor, op)
            found[name] = _said(tensor, torch.full_like(tensor, 0) + torch.tensor(wanted).to(tensor.dtype))
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            nan, zero = torch.nan if comm.rank else 1.0, -0.0 if comm.rank else 0.0
            for op, wanted in (("max", 0.0), ("min", -0.0)):
                tensor = torch.tensor([nan, zero, comm.rank], dtype=dtype)
                comm.all_reduce(tensor, op)
                right = tensor[0].isnan() and tensor[1].signbit() == torch.tensor(wanted).signbit()
                found[f"{op} of {dtype}"] = "right" if right else str(tensor)
    return found


def _said(tensor: torch.Tensor, wanted: torch.Tensor) -> str:
    return "right" if torch.equal(tensor, wanted) else f"{tensor[:3].tolist()} instead of {wanted[:3].tolist()}"


def long_ones() -> dict[str, bool]:
    """As if MPI could count no further than 1000: everything is cut."""
    before = requests.LONGEST, collectives.LONGEST, collectives.MOST_BYTES
    requests.LONGEST = collectives.LONGEST = collectives.MOST_BYTES = 1000
    found = {}
    try:
        with un.init("mpi", timeout=60) as comm:
            whole = torch.arange(5001.0) * (comm.rank + 1)
            comm.all_reduce(whole)
            found["all_reduce"] = torch.equal(whole, torch.arange(5001.0) * 3)
            comm.broadcast(whole, 1)
            sent, got = torch.arange(5001.0), torch.zeros(5001)
            other = 1 - comm.rank
            comm.sendrecv(sent, other, got, other)
            found["messages"] = torch.equal(sent, got)
            ring = torch.ones(5001)
            comm.all_reduce(ring, algorithm="ring")
            found["schedules"] = torch.equal(ring, torch.full((5001,), 2.0))
            # Only one of the two ranks has too much.
            given = [torch.arange(900.0), torch.arange(9.0)] if comm.rank == 0 else [torch.arange(10.0)] * 2
            taken = [torch.zeros(900 if comm.rank == 0 else 9), torch.zeros(10)]
            comm.all_to_all(taken, given)
            found["all_to_all"] = all(torch.equal(t, torch.arange(float(len(t)))) for t in taken)
            parts = [torch.zeros(700), torch.zeros(300)]
            comm.all_gather(parts, torch.full((700 if comm.rank == 0 else 300,), comm.rank + 1.0))
            found["all_gather"] = [t.unique().tolist() for t in parts] == [[1], [2]]
            # Few elements, but too far apart for one description.
            far = torch.zeros(1000)
            apart, mine = [far[:25], far[900:925]], torch.full((25,), comm.rank + 1.0)
            comm.all_gather(apart, mine, algorithm="native")
            found["far apart"] = [far.sum().item(), far[:25].sum().item()] == [75, 25]
            back = torch.zeros(25)
            comm.scatter(back, apart if comm.rank == 1 else None, 1, algorithm="native")
            found["scattered"] = torch.equal(back, mine)
            far.zero_()
            comm.gather(mine, apart if comm.rank == 0 else None, 0, algorithm="native")
            found["gathered"] = far.sum().item() == (75 if comm.rank == 0 else 0)
            comm.all_to_all(apart, [mine, mine * 10], algorithm="native")
            found["exchanged"] = far.sum().item() == (75 if comm.rank == 0 else 750)
    finally:
        requests.LONGEST, collectives.LONGEST, collectives.MOST_BYTES = before
    return found


def timeouts() -> list[str]:
    """A wait for a missing rank ends; the next communicator works."""
    said = []
    with un.init("mpi", timeout=60) as comm:
        part = comm.dup()
        if comm.rank == 0:
            for call in (lambda: part.barrier(timeout=0.2), part.barrier):
                try:
                    call()
                except un.errors.CommTimeoutError as error:
                    said.append(str(error))
        comm.barrier()
    return said


def leave() -> None:
    """Rank 1 leaves with a status, having caught another one; rank 0 does not expect it."""
    comm = un.init("mpi", timeout=60)
    comm.barrier()
    print(f"rank {comm.rank} works at {time.time()}", flush=True)
    comm.barrier()
    if comm.rank == 1:
        try:
            sys.exit(5)
        except SystemExit:
            comm.barrier()
        sys.exit(3)
    comm.barrier()
    while True:
        comm.all_reduce(torch.ones(2), "max")


def main() -> None:
    parts: dict[str, Callable[[], Any]] = {
        part.__name__: part for part in (bootstraps, local_rank, adopted, refused, reductions, long_ones, timeouts)
    }
    found = {name: part() for name, part in parts.items()}
    print(f"\n=== {json.dumps(found)}", flush=True)
    leave()


if __name__ == "__main__":
    sys.exit(main())
