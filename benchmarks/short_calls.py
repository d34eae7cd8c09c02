"""Time of each shared-memory operation on 8 B, and of all_reduce compared with another checkout.

Results (2 ranks, 2 cores, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/short_calls.py [--ranks 2] [--seconds 4] [--operations all_reduce barrier ...]
    python benchmarks/short_calls.py --against ../old/src [--ranks 2] [--seconds 1] [--sizes 8,4K,64K,1M,16M,100M]
        [--dtypes float32 bfloat16 float16 int64] [--memory ordinary registered] [--backend shm]

A call uses the next of 64 preallocated tensors; 64 consecutive calls run between two barriers, and every result is
verified. For send and recv, half a round trip is timed. With `--against`, ranks of both checkouts take turns, and a
ratio is this checkout's time over the other's, of neighbouring samples, with quartiles. Cells over the bound are
measured again. The other checkout's native parts must have been built (`make install` there).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from _bounds import BoundCheck, markdown
from _checkouts import Checkout, Collective
from _questions import parser

import unisono as un
from unisono.core.types import ReduceOp
from unisono.tools.bench import (
    Sample,
    Slot,
    Spread,
    Timings,
    Workload,
    clock,
    interleave,
    on_ranks,
    parse_sizes,
    shown_size,
)
from unisono.tools.bench.peers.unisono import UnisonoPeer

TENSORS = 64
# Maximum microseconds of a call.
DIRECT, MESSAGE, LISTS = 4, 6, 8
MOST_US = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single"), DIRECT),
    **dict.fromkeys(("all_to_all_single", "barrier"), DIRECT),
    "send and recv": MESSAGE,
    "stop_requested": 1,
    **dict.fromkeys(("gather", "scatter", "all_gather", "reduce_scatter", "all_to_all"), LISTS),
}
# Maximum ratio to another checkout, by number of ranks.
MOST_RATIO = {2: 1.10, 4: 1.15}

Bind = Callable[[Workload, Slot], Callable[[], object]]


def bindings(comm: un.Communicator, folder: Path) -> dict[str, tuple[str, Bind]]:
    """Return, by operation, a collective with the same data and results, and the binding of the call."""
    direct = UnisonoPeer(comm, folder).bind

    def parts(tensor: torch.Tensor, workload: Workload) -> list[torch.Tensor]:
        return list(tensor.split(workload.count))

    def there_and_back(workload: Workload, slot: Slot) -> Callable[[], object]:
        # Rank 0 gets its own data back, as in a broadcast.
        first, second = (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send)
        other = 1 - comm.rank
        return (lambda: (first(slot.target, other), second(slot.target, other))) if comm.rank < 2 else lambda: None

    return {
        **{name: (name, direct) for name in ("all_reduce", "broadcast", "reduce", "barrier", "gather", "scatter")},
        **{f"{name}_single": (name, direct) for name in ("all_gather", "reduce_scatter", "all_to_all")},
        "send and recv": ("broadcast", there_and_back),
        "stop_requested": ("barrier", lambda w, s: comm.stop_requested),
        "all_gather": ("all_gather", lambda w, s: partial(comm.all_gather, parts(s.target, w), s.source)),
        "reduce_scatter": ("reduce_scatter", lambda w, s: partial(comm.reduce_scatter, s.target, parts(s.source, w))),
        "all_to_all": (
            "all_to_all",
            lambda w, s: partial(comm.all_to_all, parts(s.target, w), parts(s.source, w)),
        ),
    }


def operations(comm: un.Communicator, names: list[str], seconds: float, folder: Path) -> Timings:
    """Return the seconds of each operation."""
    known = bindings(comm, folder)

    def sample(name: str) -> Sample:
        collective, bind = known[name]
        workload = Workload.of_bytes(collective, comm.size, 8, torch.float32, ReduceOp.SUM)
        slots = [workload.slot(torch.empty(workload.slot_numel)) for _ in range(TENSORS)]
        calls = [bind(workload, slot) for slot in slots]
        counts = name != "send and recv" or comm.rank < 2

        def take() -> float:
            for slot in slots:
                workload.fill(slot, comm.rank)
            found = clock(calls, comm) / (2 if name == "send and recv" else 1)
            if counts and any(workload.wrong(slot, comm.rank) for slot in slots):
                raise SystemExit(f"a result of {name} is wrong")
            return found

        return take

    return interleave({name: sample(name) for name in names}, comm, seconds=seconds).slowest(comm)


def case(nbytes: int, dtype: str, memory: str) -> Collective:
    """Return the case: up to 1 MiB of calls per sample (1 to 64), and up to 128 MiB of tensors (2 to 64)."""
    calls = max(1, min(TENSORS, (1 << 20) // nbytes))
    tensors = max(2, min(TENSORS, (128 << 20) // nbytes))
    return Collective(nbytes, dtype, memory == "registered", tensors, calls)


def beside(given: argparse.Namespace) -> Iterable[str]:
    """Yield a table of ratios, and a summary of its cells."""
    most = MOST_RATIO.get(given.ranks, 1.15)
    sizes = parse_sizes(given.sizes)
    found: dict[tuple[str, int, str], Spread] = {}
    here, size, backend = Path(un.__file__).parents[1], given.ranks, given.backend
    with Checkout(here, size, backend) as own, Checkout(given.against, size, backend) as other:

        def ratio(memory: str, nbytes: int, dtype: str) -> tuple[Spread, str]:
            both = case(nbytes, dtype, memory)
            timings = interleave({"own": own.sample(both), "other": other.sample(both)}, seconds=given.seconds)
            spread = timings.ratio("own", "other")
            return spread, f"{spread:.2f}, {timings.of('own').median * 1e6:.1f} us"

        lines = []
        for memory, nbytes in product(given.memory, sizes):
            cells = []
            for dtype in given.dtypes:
                found[memory, nbytes, dtype], text = ratio(memory, nbytes, dtype)
                cells.append(text)
            lines.append((f"{memory}, {shown_size(nbytes)}", *cells))
        yield markdown((f"{given.ranks} ranks", *given.dtypes), lines)
        middle = Spread.of([spread.median for spread in found.values()])
        yield str(BoundCheck(f"{given.ranks} ranks, own/other, all cells", middle, 1.05, most=True))
        for (memory, nbytes, dtype), spread in found.items():
            if spread.median > most:
                again, _ = ratio(memory, nbytes, dtype)
                what = f"{memory}, {shown_size(nbytes)}, {dtype}, own/other, {spread.median:.2f} before, again"
                yield str(BoundCheck(what, again, most, most=True))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--seconds", type=float, help="in all (4), or for each cell (1)")
    options.add_argument("--operations", nargs="+", choices=MOST_US, default=list(MOST_US))
    options.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another checkout")
    options.add_argument("--backend", default="shm", help="for --against; only shm has registered memory")
    options.add_argument("--sizes", default="8,4K,64K,1M,16M,100M")
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16", "int64"])
    options.add_argument("--memory", nargs="+", choices=("ordinary", "registered"), default=["ordinary", "registered"])
    given = options.parse_args()
    given.seconds = given.seconds or (1.0 if given.against else 4.0)
    if given.against:
        for line in beside(given):
            print(line, flush=True)
        return
    timings = on_ranks(operations, given.ranks, "shm", (given.operations, given.seconds))[0]
    for name in given.operations:
        print(BoundCheck(f"{given.ranks} ranks, 8 B, {name}, us", timings.of(name) * 1e6, MOST_US[name], most=True))


if __name__ == "__main__":
    main()
