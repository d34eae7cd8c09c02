"""Cost of operators that draw random numbers, during and after a run of thread ranks.

Results (one thread) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/random_numbers.py [--seconds 2]

Blocks of 200 calls on 8 elements take turns: without ranks, in a rank, in a thread that belongs to none while a rank
lives, and when it has ended; a line is the median difference of neighbouring blocks, with quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from _bounds import BoundCheck
from _questions import parser

from unisono.core.thread_ranks import ThreadRank, own_generators
from unisono.tools.bench import Spread, clock

CALLS = 200
MOST_US = {"in a rank": 5.0, "in another thread": 5.0, "afterwards": 0.5}


def block(call: Callable[[], object]) -> float:
    """Return the microseconds of a call."""
    return clock([call] * CALLS) * 1e6


def main() -> None:
    given = parser(__doc__, seconds=2.0).parse_args()
    torch.set_num_threads(1)
    eight = torch.ones(8)
    calls: dict[str, Callable[[], object]] = {
        "normal_": eight.normal_,
        "dropout": lambda: torch.nn.functional.dropout(eight),
        "randperm": lambda: torch.randperm(8),
    }
    for name, call in calls.items():
        block(call)
        plain: list[float] = []
        more: dict[str, list[float]] = {where: [] for where in MOST_US}
        end = time.monotonic() + given.seconds
        while time.monotonic() < end or len(plain) < 20:
            plain.append(block(call))
            with own_generators:
                more["in another thread"].append(block(call) - plain[-1])
                with ThreadRank():
                    more["in a rank"].append(block(call) - plain[-1])
            more["afterwards"].append(block(call) - plain[-1])
        print(f"{name}: {statistics.median(plain):.2f} us without ranks")
        for where, found in more.items():
            print(BoundCheck(f"us more {where}", Spread.of(found), MOST_US[where], most=True))


if __name__ == "__main__":
    main()
