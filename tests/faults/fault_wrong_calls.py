"""Ranks that call different things, and messages that do not fit."""

from __future__ import annotations

from typing import Any

import torch
from fault_rows import LONG_S, fault, odd
from insides import engine_of

import unisono as un
from unisono.errors import MismatchError


@fault("unequal sizes in all_reduce", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(5 if odd(comm) else 4))


@fault("unequal sizes, far above the first stage", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones((1 << 20) + odd(comm)))


@fault("no elements on one rank", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(0 if odd(comm) else 4))


@fault("dtypes of equal width", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4, dtype=torch.int32 if odd(comm) else torch.float32))


@fault("dtypes of different widths", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4, dtype=torch.float64 if odd(comm) else torch.float32))


@fault("sum against max", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4), "max" if odd(comm) else "sum")


@fault("average against sum", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4), "avg" if odd(comm) else "sum")


@fault("roots differ in broadcast", MismatchError)
def _(comm: Any) -> None:
    comm.broadcast(torch.ones(4), 2 if odd(comm) else 0)


@fault("roots differ in reduce", MismatchError)
def _(comm: Any) -> None:
    comm.reduce(torch.ones(4), 2 if odd(comm) else 0)


@fault("roots differ in gather", MismatchError)
def _(comm: Any) -> None:
    root = 1 if odd(comm) else 0
    out = [torch.zeros(4) for _ in range(comm.size)] if comm.rank == root else None
    comm.gather(torch.ones(4), out, root)


@fault("roots differ in scatter", MismatchError)
def _(comm: Any) -> None:
    root = 1 if odd(comm) else 0
    given = [torch.zeros(4) for _ in range(comm.size)] if comm.rank == root else None
    comm.scatter(torch.ones(4), given, root)


@fault("roots differ in broadcast_object", MismatchError)
def _(comm: Any) -> None:
    comm.broadcast_object("x", 2 if odd(comm) else 0)


@fault("different operations", MismatchError)
def _(comm: Any) -> None:
    comm.broadcast(torch.ones(4), 0) if odd(comm) else comm.all_reduce(torch.ones(4))


@fault("a collective against a barrier", MismatchError)
def _(comm: Any) -> None:
    comm.barrier() if odd(comm) else comm.all_reduce(torch.ones(4))


@fault("a missing call, then others", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(4))
    if not odd(comm):
        comm.all_reduce(torch.ones(4))
    comm.broadcast(torch.ones(2), 0)


@fault("crossed order of two calls", MismatchError)
def _(comm: Any) -> None:
    calls = [lambda: comm.all_reduce(torch.ones(4)), lambda: comm.all_reduce(torch.ones(4, dtype=torch.float64))]
    for call in reversed(calls) if odd(comm) else calls:
        call()


@fault("crossed order of two asynchronous calls", MismatchError)
def _(comm: Any) -> None:
    tensors = [torch.ones(4), torch.ones(8)]
    works = [comm.all_reduce(t, async_op=True) for t in (reversed(tensors) if odd(comm) else tensors)]
    for work in works:
        work.wait()


@fault("algorithms differ", MismatchError)
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones(8), algorithm="ring" if odd(comm) else "one_shot")


@fault("unequal lists in all_gather", MismatchError)
def _(comm: Any) -> None:
    lengths = (2, 2, 3) if odd(comm) else (2, 2, 2)
    comm.all_gather([torch.zeros(n) for n in lengths], torch.ones(2))


@fault("unequal sizes in reduce_scatter", MismatchError)
def _(comm: Any) -> None:
    length = 3 if odd(comm) else 2
    comm.reduce_scatter(torch.zeros(length), [torch.ones(length) for _ in range(comm.size)])


@fault("unequal sizes in scatter", MismatchError)
def _(comm: Any) -> None:
    given = [torch.zeros(4) for _ in range(comm.size)] if comm.rank == 0 else None
    comm.scatter(torch.ones(5 if odd(comm) else 4), given, 0)


@fault("rows that do not fit in all_to_all", MismatchError)
def _(comm: Any) -> None:
    expected = [3 if odd(comm) and r != comm.rank else 2 for r in range(comm.size)]
    comm.all_to_all_single(torch.zeros(sum(expected)), torch.ones(2 * comm.size), expected, [2] * comm.size)


@fault("different lists given to subgroup", MismatchError, breaks=False, names_odd=True)
def _(comm: Any) -> None:
    comm.subgroup([0, 1] if odd(comm) else [0, 2])


@fault("a rank with other code: another model", MismatchError, breaks=False, named=("rank", "size"))
def _(comm: Any) -> None:
    un.GradientAverager(torch.nn.Linear(4, 3 if odd(comm) else 2), comm)


@fault("shapes differ, in check='full'", MismatchError, check="full")
def _(comm: Any) -> None:
    comm.all_reduce(torch.ones((4,) if odd(comm) else (2, 2)))


@fault("a buffer changed before wait, in check='full'", MismatchError, check="full", names_odd=False)
def _(comm: Any) -> None:
    engine = engine_of(comm)
    changed = f"{engine.group.name}/changed"
    tensor = torch.ones(4)
    if not odd(comm):
        # Until the other ranks come, the call cannot have ended.
        engine.control.get(changed, LONG_S)
    work = comm.all_reduce(tensor, async_op=True)
    if odd(comm):
        tensor.zero_()
        engine.control.set(changed, b"")
    work.wait()
    comm.barrier(timeout=LONG_S)


# -- messages that do not fit ----------------------------------------------------------------------
def _message(comm: Any, sent: torch.Tensor, expected: torch.Tensor) -> None:
    """Message from rank 0 to rank 1, while rank 2 is in a barrier."""
    if comm.rank == 0:
        comm.send(sent, 1)
    elif odd(comm):
        comm.recv(expected, 0)
    comm.barrier(timeout=LONG_S)


@fault("a message longer than its receive", MismatchError)
def _(comm: Any) -> None:
    _message(comm, torch.ones(5), torch.ones(4))


@fault("a message shorter than its receive", MismatchError)
def _(comm: Any) -> None:
    _message(comm, torch.ones(3), torch.ones(4))


@fault("a message with another dtype", MismatchError)
def _(comm: Any) -> None:
    _message(comm, torch.ones(4), torch.ones(4, dtype=torch.int32))
