"""The program of mpi4py_before.py on unisono.

mpirun -n 4 python docs/examples/coming_from/mpi4py_after.py
unisono run -n 4 docs/examples/coming_from/mpi4py_after.py
"""

from __future__ import annotations

import torch

import unisono as un


def solve(comm: un.Communicator, cells: int = 50, tolerance: float = 1e-4) -> tuple[int, float]:
    """Let heat spread from the left end of a rod, of which each rank has some cells; steps, and the mean heat."""
    mine = len(range(comm.rank, cells, comm.size))
    heat = torch.zeros(mine + 2, dtype=torch.float64)  # one more cell at each end, a copy of a neighbour's
    heat[0] = 1.0 if comm.rank == 0 else 0.0
    messages: list[un.Send | un.Recv] = []  # none to the left of the first rank, nor to the right of the last
    if comm.rank > 0:
        messages += [un.Send(heat[1:2], comm.rank - 1), un.Recv(heat[:1], comm.rank - 1)]
    if comm.rank + 1 < comm.size:
        messages += [un.Send(heat[-2:-1], comm.rank + 1), un.Recv(heat[-1:], comm.rank + 1)]
    change, steps = torch.ones(1, dtype=torch.float64), 0
    while change.item() > tolerance:
        for work in comm.batch_isend_irecv(messages):
            work.wait()
        new = (heat[:-2] + heat[2:]) / 2
        change[0] = (new - heat[1:-1]).abs().max()
        heat[1:-1] = new
        comm.all_reduce(change, "max")
        steps += 1
    whole = torch.cat(comm.all_gather_v(heat[1:-1]))
    return steps, whole.mean().item()


if __name__ == "__main__":
    with un.init() as comm:
        steps, mean = solve(comm)
        if comm.rank == 0:
            print(f"{steps} steps, mean heat {mean:.12f}")
