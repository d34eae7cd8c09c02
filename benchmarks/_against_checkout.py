"""Time of a step, a checkpoint and a remote call against another checkout, such as a git worktree of an older commit.

    python benchmarks/_against_checkout.py ../old/src [--ranks 2] [--seconds 10] [--backends shm tcp]
        [--programs averager sharded checkpoint_save checkpoint_load rpc_sync]

Ranks of both checkouts take turns; a ratio is this checkout's time over the other's, in neighbouring samples, with
quartiles. Models are small, so that the time is the library's. The other checkout's native parts must have been built.
"""

from __future__ import annotations

from pathlib import Path

from _checkouts import Checkout, Repeated
from _questions import parser

import unisono as un
from unisono.tools.bench import BoundCheck, interleave

CALLS = {"averager": 20, "sharded": 10, "checkpoint_save": 2, "checkpoint_load": 5, "rpc_sync": 50}
MOST_RATIO = 1.02


def main() -> None:
    options = parser(__doc__, seconds=10.0)
    options.add_argument("other", type=Path, metavar="SRC", help="the src folder of the other checkout")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--backends", nargs="+", default=["shm", "tcp"])
    options.add_argument("--programs", nargs="+", choices=CALLS, default=list(CALLS))
    given = options.parse_args()
    here = Path(un.__file__).parents[1]
    for backend in given.backends:
        with Checkout(here, given.ranks, backend) as own, Checkout(given.other, given.ranks, backend) as other:
            for program in given.programs:
                case = Repeated(program, CALLS[program])
                timings = interleave({"own": own.sample(case), "other": other.sample(case)}, seconds=given.seconds)
                text = f"{backend}, {program}, {timings.of('own').median * 1e6:,.0f} us, own/other"
                print(BoundCheck(text, timings.ratio("own", "other"), MOST_RATIO, most=True), flush=True)


if __name__ == "__main__":
    main()
