"""Microseconds that the training thread spends in each part of a `GradientAverager`, per step.

    python benchmarks/step_account.py [--ranks 2] [--backends shm tcp] [--models mlp deep] [--seconds 4]

Steps alone and averaged steps are measured in turn, first as they are, then with a timer around each part of the
averager. A part's time excludes that of the parts it calls, and of the timers. "waiting" is a barrier before each
reduction, which only the second measurement has: the time until the slowest rank has arrived. "torch" is the part of
the difference between the two steps that no timer saw: torch's calls of the hooks, and gradients that have left the
cache.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from _questions import parser
from averager_against_ddp import MODELS

import unisono as un
from unisono.gradients.averaging import Averaging
from unisono.gradients.bucket import BucketContents
from unisono.gradients.parameter_registry import ParameterRegistry
from unisono.gradients.reduction import Reduction
from unisono.tools.bench import interleave, on_ranks, timed
from unisono.utils import backward_pass
from unisono.utils.backward_pass import BackwardTracker

PARTS: dict[str, tuple[Any, str]] = {
    "check of the parameters": (ParameterRegistry, "problem"),
    "hook on the output": (Averaging, "_watch_outputs"),
    "hooks on gradients": (BackwardTracker, "arrive"),
    "begin": (Averaging, "begin"),
    "hooks on chunks": (Averaging, "_on_chunk_ready"),
    "copies": (BucketContents, "take"),
    "header and weight": (BucketContents, "finalize"),
    "start of a reduction": (Reduction, "_reduce"),
    "all_reduce": (un.Communicator, "all_reduce"),
    "wait for a reduction": (Reduction, "_wait"),
    "header of all ranks": (BucketContents, "read_header"),
    "assignment of p.grad": (Reduction, "assign"),
    "next step's state": (Averaging, "_new_reduction"),
    "end": (Averaging, "end"),
    "callback of the engine": (backward_pass, "_end_passes"),
}
"""Functions of the averager, by the name under which their own time is reported."""


class Account:
    """Own time of the parts, in nanoseconds, of the steps since `clear`."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = [0]
        self._timer_ns = 0
        self._timer_ns = self._calibrated()

    def clear(self) -> None:
        self.spent.clear()
        self.calls.clear()

    def timed(self, part: str, call: Callable[..., Any], before: Callable[[Any], None] | None = None) -> Any:
        """Return the function with its own time added to a part; `before` is called first, outside that time."""

        @wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            if before is not None:
                before(given[0])
            self._inner.append(0)
            began = time.perf_counter_ns()
            try:
                return call(*given, **named)
            finally:
                took = time.perf_counter_ns() - began
                self.spent[part] += took - self._inner.pop()
                self.calls[part] += 1
                self._inner[-1] += took + self._timer_ns

        return run

    def _calibrated(self) -> int:
        """Nanoseconds that a timer takes beside what it reports."""
        call = self.timed("", lambda: None)
        began = time.perf_counter_ns()
        for _ in range(10_000):
            call()
        each = (time.perf_counter_ns() - began - self.spent[""]) // 10_000
        self.clear()
        return each


def account(comm: un.Communicator, name: str, seconds: float, inside: bool, folder: Path) -> dict[str, float]:
    """Return medians in microseconds: the two steps, and with `inside` the parts, by name."""
    kept = Account()
    if inside:
        for part, (owner, method) in PARTS.items():
            before = kept.timed("waiting", un.Communicator.barrier) if part == "all_reduce" else None
            setattr(owner, method, kept.timed(part, getattr(owner, method), before))
    steps: dict[str, Callable[[], object]] = {}
    batch = torch.randn(MODELS[name][1], generator=torch.Generator().manual_seed(comm.rank))
    for way in ("alone", "averaged"):
        torch.manual_seed(1)
        model = MODELS[name][0]()
        if way == "averaged":
            un.GradientAverager(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        steps[way] = step
    by_step: list[Counter[str]] = []

    def keep() -> None:
        by_step.append(Counter(kept.spent))
        kept.clear()

    samples = {way: timed(step, comm) for way, step in steps.items()}
    timings = interleave(samples, comm, seconds=seconds, least=48, warmup=6, after_round=keep)
    found = {way: statistics.median(timings.figures[way]) * 1e6 for way in steps}
    counted = by_step[-timings.rounds :]
    parts = ("waiting", *PARTS) if inside else ()
    return found | {part: statistics.median(spent[part] for spent in counted) / 1e3 for part in parts}


def main() -> None:
    options = parser(__doc__, seconds=4.0)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--backends", nargs="+", default=["shm", "tcp"])
    options.add_argument("--models", nargs="+", choices=MODELS, default=["mlp", "deep"])
    given = options.parse_args()
    for backend in given.backends:
        for name in given.models:
            plain, inside = (
                on_ranks(account, given.ranks, backend, (name, given.seconds, timers))[0] for timers in (False, True)
            )
            print(f"{name}, {given.ranks} ranks, {backend}: step alone {plain['alone']:.0f} us, averaged", end=" ")
            print(f"{plain['averaged']:.0f}; with timers {inside['averaged'] - inside['alone']:.0f} more than alone:")
            parts = {part: spent for part, spent in inside.items() if part not in ("alone", "averaged")}
            parts["torch"] = inside["averaged"] - inside["alone"] - sum(parts.values())
            for part, spent in parts.items():
                if round(spent):
                    print(f"  {part:26} {spent:7.0f}")


if __name__ == "__main__":
    main()
