"""Time of what the library does against another checkout, such as a git worktree of an older commit.

    python benchmarks/_against_checkout.py ../old/src [--ranks 2] [--seconds 4] [--rounds 5] [--programs network rpc]

Ranks of both checkouts take turns, in the order A B B A; a ratio is this checkout's time over the other's, in
neighbouring samples, with quartiles. Programs have the names of those that compare unisono with other libraries, and
measure the same calls; models are small, so that the time is the library's. `two_hosts` needs root, for hosts of
`unisono.testing.Network`. The other checkout's native parts must have been built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from _bounds import BoundCheck
from _checkouts import Checkout, Collective, Repeated
from _questions import parser
from engine_startup import started
from two_hosts import BACKEND, LINKS

import unisono as un
from unisono.testing import Network
from unisono.testing.namespaced_ranks import obstacle
from unisono.tools.bench import Sample, interleave, parse_sizes, shown_size

ALL = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
MOST_RATIO = 1.03

Cases = Mapping[str, Collective | Repeated]
Line = tuple[str, Sample, Sample]


def collectives(names: Iterable[str], sizes: str) -> Cases:
    """Return a case for each name and size, of at most 1 MiB of calls and 128 MiB of tensors."""
    found = {}
    for name in names:
        for nbytes in parse_sizes("8" if name == "barrier" else sizes):
            tensors = max(2, min(64, (128 << 20) // nbytes))
            calls = max(1, min(64, (1 << 20) // nbytes))
            found[f"{name}, {shown_size(nbytes)}"] = Collective(nbytes, tensors=tensors, calls=calls, name=name)
    return found


def repeated(**calls: int) -> Cases:
    return {program: Repeated(program, count) for program, count in calls.items()}


SWEEP = collectives(["all_reduce"], "8,1K,16K,64K,1M,16M")
OTHERS = collectives((*ALL, "message", "barrier"), "8,64K,1M")
TRAINING = repeated(averager=20, sharded=10, checkpoint_save=2, checkpoint_load=5)
TORCH = repeated(torch_all_reduce=1000, torch_ddp=20, torch_fsdp2=10)
RPC = repeated(rpc_sync=50, rpc_tensor=10, rpc_in_flight=1)
# The backends of each program, and its cases.
PROGRAMS: dict[str, tuple[tuple[str, ...], Cases]] = {
    "training": (("shm", "tcp"), TRAINING),
    "rpc": (("shm", "tcp"), RPC),
    "torch": (("shm",), TORCH),
    "shm_against_gloo": (("shm",), SWEEP | OTHERS | collectives(("gather", "scatter"), "8,64K,1M")),
    "network": (("tcp",), SWEEP | OTHERS),
    "two_hosts": ((BACKEND,), SWEEP),
    "pool": (("",), repeated(pool_map=1, pool_submit=1)),
    "engine_startup": (("",), repeated(launch=1)),
}


def lines(given: argparse.Namespace, program: str) -> Iterator[Line]:
    """Yield what is timed, and a sample of each checkout."""
    here = Path(un.__file__).parents[1]
    backends, cases = PROGRAMS[program]
    links = given.links if program == "two_hosts" else [""]
    for backend, link in ((backend, link) for backend in backends for link in links):
        with ExitStack() as stack:
            network = stack.enter_context(Network(2, **LINKS[link])) if link else None
            ranks = given.ranks * 2 if link else given.ranks
            own, other = (
                stack.enter_context(Checkout(source, ranks, backend, network)) for source in (here, given.other)
            )
            for what, case in cases.items():
                yield ", ".join(filter(None, (program, backend, link, what))), own.sample(case), other.sample(case)
    if program == "engine_startup":
        for engine in given.engines:

            def first(source: Path, engine: str = engine) -> Callable[[], float]:
                return lambda: started(engine, given.ranks, source)[0]

            yield f"{program}, {engine}, first launch", first(here), first(given.other)


def main() -> None:
    options = parser(__doc__, seconds=4.0)
    options.add_argument("other", type=Path, metavar="SRC", help="the src folder of the other checkout")
    options.add_argument("--ranks", type=int, default=2, help="of each host (%(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="least number of rounds, for slow cases (%(default)s)")
    options.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    options.add_argument("--links", nargs="+", choices=LINKS, default=["free", "near"], help="for two_hosts")
    options.add_argument("--engines", nargs="+", default=["local", "pool"], help="for engine_startup")
    given = options.parse_args()
    for program in given.programs:
        reason = obstacle(slow="far" in given.links) if program == "two_hosts" else None
        if reason is not None:
            print(f"{program}: not measured: {reason}", flush=True)
            continue
        for what, own, other in lines(given, program):
            timings = interleave({"own": own, "other": other}, seconds=given.seconds, least=given.rounds)
            text = f"{what}, {timings.of('own').median * 1e6:,.1f} us, own/other"
            print(BoundCheck(text, timings.ratio("own", "other"), MOST_RATIO, most=True), flush=True)


if __name__ == "__main__":
    main()
