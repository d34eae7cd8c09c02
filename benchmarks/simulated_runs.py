"""Simulated runs per hour of a small training job, and the cost of a message.

Results (one core) are in docs/benchmarks.md; run it to measure on your machine. The same program on threads, with real
waits, runs in turn with the simulation; every result is compared.

    python benchmarks/simulated_runs.py [--seconds 10]
"""

from __future__ import annotations

import itertools
import statistics

import torch
from _bounds import BoundCheck
from _questions import parser

import unisono as un
from unisono.testing import chaos
from unisono.tools.bench import Spread, interleave, timed

RANKS, STEPS, MESSAGES = 3, 5, 2000
WANTED_AN_HOUR = 2000


def training(comm: un.Communicator) -> torch.Tensor:
    """Return the weights after a few steps of SGD in float64."""
    draw = torch.Generator().manual_seed(7)
    weight = torch.randn(4, 1, generator=draw, dtype=torch.float64, requires_grad=True)
    un.broadcast_parameters([weight], comm)
    optimizer = torch.optim.SGD([weight], lr=0.05, momentum=0.9)
    for batch in torch.randn(STEPS, 2 * RANKS, 4, generator=draw, dtype=torch.float64):
        mine = batch[comm.rank :: comm.size]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(mine @ weight, mine.sum(1, keepdim=True)).backward()
        un.average_gradients([weight], comm)
        optimizer.step()
    return weight.detach()


def ping(comm: un.Communicator, messages: int) -> None:
    """Send this number of messages from rank 0 to rank 1."""
    t = torch.zeros(1)
    for _ in range(messages):
        comm.send(t, 1) if comm.rank == 0 else comm.recv(t, 0)


def line(what: str, times: Spread) -> str:
    return f"{what:42} {times.median * 1e3:7.2f} ms (quartiles {times.low * 1e3:.2f} to {times.high * 1e3:.2f})"


def main() -> None:
    given = parser(__doc__, seconds=10.0).parse_args()
    torch.set_num_threads(1)
    expected = un.launch(training, RANKS, "thread")[0]
    seeds = itertools.count()

    def simulated() -> None:
        found = un.simulate(training, RANKS, seed=next(seeds)).results
        assert all(torch.equal(each, expected) for each in found)

    def in_chaos() -> None:
        outcomes = chaos.run(training, RANKS, next(seeds)).outcomes
        assert chaos.named_or_right(outcomes, [expected] * RANKS) is None

    def on_threads() -> None:
        assert all(torch.equal(found, expected) for found in un.launch(training, RANKS, "thread"))

    ways = {
        "a training of 3 ranks, 5 steps, simulated": simulated,
        "the same in chaos": in_chaos,
        "the same on threads": on_threads,
    }
    timings = interleave({what: timed(way) for what, way in ways.items()}, seconds=given.seconds)
    for what in ways:
        print(line(what, timings.of(what)))
    an_hour = 3600 / statistics.mean(timings.figures["the same in chaos"])
    print(BoundCheck("chaos runs an hour", Spread.of([an_hour]), WANTED_AN_HOUR))
    pings = {
        count: timed(lambda count=count: un.simulate(ping, 2, (count,), seed=next(seeds))) for count in (MESSAGES, 0)
    }
    timings = interleave({str(count): ping for count, ping in pings.items()}, seconds=given.seconds / 2, least=3)
    each = timings.difference(str(MESSAGES), "0").median / MESSAGES
    print(f"a message between simulated ranks costs {each * 1e6:.0f} us of real time")


if __name__ == "__main__":
    main()
