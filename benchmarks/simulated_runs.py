"""How many simulated runs of a small training does an hour hold, and what does a message cost?

Answer (one core): see docs/benchmarks.md; run it to see yours. The same program on threads, whose waits are real,
is run in turn with it; every result is compared.

    python benchmarks/simulated_runs.py [--seconds 20]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import unisono as un
from unisono.testing import chaos

RANKS, STEPS, MESSAGES = 3, 5, 2000
WANTED_AN_HOUR = 2000


def training(comm: un.Communicator) -> torch.Tensor:
    """Weights after a few steps of SGD in float64."""
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
    """So many messages from rank 0 to rank 1."""
    t = torch.zeros(1)
    for _ in range(messages):
        comm.send(t, 1) if comm.rank == 0 else comm.recv(t, 0)


def in_turn(seconds: float, *ways: Callable[[int], object]) -> list[list[float]]:
    """Times of each way in seconds, one after another, until the time is up."""
    taken: list[list[float]] = [[] for _ in ways]
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        for times, way in zip(taken, ways, strict=True):
            started = time.perf_counter()
            way(number)
            times.append(time.perf_counter() - started)
        number += 1
    return taken


def told(what: str, times: list[float]) -> str:
    low, median, high = statistics.quantiles(times, n=4)
    return f"{what:42} {median * 1e3:7.2f} ms (quartiles {low * 1e3:.2f} to {high * 1e3:.2f}, {len(times)} runs)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="in all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    expected = un.launch(training, RANKS, "thread")[0]

    def simulated(seed: int) -> None:
        assert all(torch.equal(found, expected) for found in un.simulate(training, RANKS, seed=seed).results)

    def in_chaos(seed: int) -> None:
        assert chaos.named_or_right(chaos.run(training, RANKS, seed).outcomes, [expected] * RANKS) is None

    def on_threads(_: int) -> None:
        assert all(torch.equal(found, expected) for found in un.launch(training, RANKS, "thread"))

    for way in (simulated, in_chaos, on_threads):
        way(0)
    calm, chaotic, threads = in_turn(0.75 * options.seconds, simulated, in_chaos, on_threads)
    print(told("a training of 3 ranks, 5 steps, simulated", calm))
    print(told("the same in chaos", chaotic))
    print(told("the same on threads", threads))
    an_hour = 3600 / statistics.mean(chaotic)
    verdict = "kept" if an_hour >= WANTED_AN_HOUR else "MISSED"
    print(f"{an_hour:.0f} chaos runs an hour; at least {WANTED_AN_HOUR} wanted: {verdict}")
    many, none = in_turn(
        0.25 * options.seconds,
        lambda seed: un.simulate(ping, 2, (MESSAGES,), seed=seed),
        lambda seed: un.simulate(ping, 2, (0,), seed=seed),
    )
    each = (statistics.median(many) - statistics.median(none)) / MESSAGES
    print(f"a message between simulated ranks costs {each * 1e6:.0f} us of real time")


if __name__ == "__main__":
    main()
