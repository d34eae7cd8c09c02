"""Repeatedly runs a program under random faults: each rank must get the right result, or an error naming a rank.

    chaos.check(program, 3, seeds=range(100))

Ranks are simulated, so a run depends only on its seed, which determines the network, the faults and the order in which
ranks are scheduled. `chaos.run(program, 3, seed)` replays a run exactly.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

import torch

from unisono.core.transport import Transport
from unisono.errors import CommError
from unisono.launcher.simulated import Simulated, simulate
from unisono.transports.sim import Link, SimNetwork
from unisono.wrappers.checksum import Checksummed
from unisono.wrappers.fault import Faulty, KilledError
from unisono.wrappers.rank_faults import RankFaults

__all__ = ["ChaosError", "FaultPlan", "Judge", "Run", "check", "named_or_right", "run", "weather"]

_TIMEOUT_S = 10.0

_Program = Callable[..., Any]
Judge = Callable[[Sequence[Any], Sequence[Any]], str | None]
"""Function that takes all ranks' outcomes and a fault-free run's results, and returns what is wrong, or None."""


class ChaosError(AssertionError):
    """Raised if a run ends with a wrong result or a rejected error. The message has the seed that replays the run.

    Example:
        >>> try:
        ...     check(lambda comm: object(), 2, seeds=[7])
        ... except ChaosError as error:
        ...     str(error).startswith("seed 7: rank 0 has")
        True
    """


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Network and faults drawn from a seed.

    Attributes:
        network: Latency and bandwidth of each link.
        faults: Arguments of `unisono.testing.Faulty`.
        preempt: The argument `preempt` of `unisono.simulate`: the probability of a switch to another rank.

    Example:
        >>> plan = weather(seed=5, nprocs=3)
        >>> isinstance(plan, FaultPlan), sorted(plan.faults)
        (True, ['corrupt', 'on_ranks'])
    """

    network: SimNetwork
    faults: dict[str, Any]
    preempt: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run under one seed.

    Attributes:
        seed: The seed for everything random.
        outcomes: A result or an error, by rank.
        weather: The injected faults.
        time_s: Duration in virtual seconds.
        digest: Hash of `trace`: equal for identical runs.
        trace: One line per event, in order.

    Example:
        >>> first, second = (run(lambda comm: comm.rank, 2, seed=1) for _ in range(2))
        >>> isinstance(first, Run), first.digest == second.digest, first.outcomes
        (True, True, [0, 1])
    """

    seed: int
    outcomes: list[Any]
    weather: FaultPlan
    time_s: float
    digest: str
    trace: list[str] = field(repr=False)

    @property
    def ending(self) -> str:
        """Short summary: "right" if no rank raised an error, otherwise the names of the errors' classes."""
        errors = sorted({type(outcome).__name__ for outcome in self.outcomes if isinstance(outcome, BaseException)})
        return ", ".join(errors) or "right"


def weather(seed: int, nprocs: int) -> FaultPlan:
    """Return a network and faults drawn from a seed: none for one seed in eight, otherwise one to three.

    Args:
        seed: Any int.
        nprocs: Number of ranks.

    Example:
        >>> weather(5, 3) == weather(5, 3)
        True
    """
    draw = Random(f"weather {seed}")
    fast = Link(10 ** draw.uniform(-6, -3), 10 ** draw.uniform(-10, -7))
    slow = Link(fast.latency_s * 100, fast.second_per_byte * 100)
    pairs = [(a, b) for a in range(nprocs) for b in range(nprocs) if a != b]
    links = {pair: slow for pair in pairs if draw.random() < 0.1}
    network = SimNetwork(fast, links, jitter=draw.choice((0.0, 0.5, 5.0)))
    drawn: dict[str, Any] = {}
    for name in draw.sample(sorted(_FAULTS), draw.randint(1, 3)) if draw.random() < 7 / 8 else ():
        drawn.update(_FAULTS[name](draw, nprocs))
    names = {field.name for field in fields(RankFaults)}
    faults = {name: value for name, value in drawn.items() if name not in names}
    if names & drawn.keys():
        faults["on_ranks"] = RankFaults(**{name: value for name, value in drawn.items() if name in names})
    return FaultPlan(network, faults, draw.choice((0.0, 0.0, 0.1)))


def _soon(draw: Random) -> int:
    """Draw the index of the message at which to kill or freeze a rank: from 1 to 30, mostly small."""
    return round(math.exp(draw.uniform(0.0, math.log(30.0))))


_FAULTS: dict[str, Callable[[Random, int], dict[str, Any]]] = {
    "drop": lambda draw, size: {"drop": 10 ** draw.uniform(-3, -1)},
    "delay": lambda draw, size: {"delay": draw.uniform(0.0, 0.5), "delay_s": 10 ** draw.uniform(-5, 0)},
    "duplicate": lambda draw, size: {"duplicate": 10 ** draw.uniform(-3, -1)},
    "reorder": lambda draw, size: {"reorder": 10 ** draw.uniform(-3, -0.5)},
    "corrupt": lambda draw, size: {"corrupt": 10 ** draw.uniform(-3, -1)},
    "slow": lambda draw, size: {"slow_bytes_per_s": 10 ** draw.uniform(3, 8), "ranks": [draw.randrange(size)]},
    "kill": lambda draw, size: {"kill_at": _soon(draw), "ranks": [draw.randrange(size)]},
    "freeze": lambda draw, size: {
        "freeze_at": _soon(draw),
        "freeze_s": draw.choice((0.01, 1.0, 2 * _TIMEOUT_S, None)),
        "ranks": [draw.randrange(size)],
    },
}


def run(program: _Program, nprocs: int, seed: int, *args: Any, **options: Any) -> Run:
    """Run `program(comm, *args)` once under the faults drawn from the seed.

    Messages have checksums, so a corrupted message raises an error and never yields a wrong result.

    Args:
        program: The program of each rank.
        nprocs: Number of ranks.
        seed: Seed for everything random.
        args: Passed to the program.
        options: Options of `unisono.simulate`; `timeout` defaults to 10 virtual seconds.

    Returns: The outcome of each rank and the trace. A rank's error is returned as its outcome, not raised.

    Raises:
        ChaosError: The run leaked threads.
    """
    drawn = weather(seed, nprocs)

    def wrap(inner: Transport) -> Transport:
        return Checksummed(Faulty(inner, seed=seed, **drawn.faults))

    drawn_options = {"seed": seed, "network": drawn.network, "preempt": drawn.preempt, "wrap": wrap}
    done = _simulated(program, nprocs, args, {**drawn_options, **options})
    return Run(seed, done.results, drawn, done.time_s, done.digest, done.trace)


def _simulated(program: _Program, nprocs: int, args: Sequence[Any], options: dict[str, Any]) -> Simulated:
    before = set(threading.enumerate())
    done = simulate(program, nprocs, args, on_failure="continue", **{"timeout": _TIMEOUT_S, **options})
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    if left:
        raise ChaosError(f"seed {done.seed} has left threads behind: {', '.join(left)}")
    return done


def check(
    program: _Program,
    nprocs: int,
    *args: Any,
    seeds: Iterable[int],
    judge: Judge | None = None,
    replay: bool = True,
    **options: Any,
) -> Counter[str]:
    """Run a program under each seed's faults, judge its outcomes, and check that a replay gives the same trace.

    Args:
        program: The program of each rank; its result is compared with the result of a run without faults.
        nprocs: Number of ranks.
        args: Passed to the program.
        seeds: Seeds, one per run.
        judge: Function that returns what is wrong, or None, given the outcomes by rank and the results of a fault-free
            run; by default `named_or_right`.
        replay: Whether to run each seed twice, and compare the traces.
        options: Options of `unisono.simulate`.

    Returns:
        Number of runs for each value of `Run.ending`.

    Raises:
        ChaosError: A run ended with a wrong result, or an error that `judge` rejects; the message contains the seed.

    Example:
        >>> def program(comm):
        ...     t = torch.ones(3) * comm.rank
        ...     comm.all_reduce(t)
        ...     return t
        >>> endings = check(program, 3, seeds=range(5))
        >>> endings.total(), endings["right"] > 0
        (5, True)
    """
    calm = _simulated(program, nprocs, args, {"seed": 0, **options}).results
    verdict = named_or_right if judge is None else judge
    endings: Counter[str] = Counter()
    for seed in seeds:
        done = run(program, nprocs, seed, *args, **options)
        wrong = verdict(done.outcomes, calm)
        if wrong is not None:
            raise ChaosError(f"seed {seed}: {wrong} ({done.weather})")
        if replay:
            again = run(program, nprocs, seed, *args, **options)
            if again.digest != done.digest:
                raise ChaosError(f"seed {seed} does not run the same way twice: {_difference(done, again)}")
        endings[done.ending] += 1
    return endings


def named_or_right(outcomes: Sequence[Any], calm: Sequence[Any]) -> str | None:
    """Accept, from each rank, either the fault-free result or an error that names a rank and an operation.

    This function is the default `judge` of `check`. Tensors are compared bit for bit, and `KilledError` is accepted
    from a killed rank.

    Args:
        outcomes: A result or an error, by rank.
        calm: Results of a run without faults, by rank.

    Returns: Description of the first wrong outcome; None if all outcomes are accepted.

    Example:
        >>> named_or_right([1, 2], [1, 2]), named_or_right([1, 3], [1, 2])
        (None, 'rank 1 has 3, not 2')
    """
    for rank, (outcome, wanted) in enumerate(zip(outcomes, calm, strict=True)):
        if isinstance(outcome, KilledError):
            continue
        if isinstance(outcome, CommError):
            if outcome.rank is None or outcome.operation is None:
                return f"the error of rank {rank} has no rank or operation: {outcome!r}"
        elif isinstance(outcome, BaseException):
            return f"rank {rank} ended by {outcome!r}"
        elif not _equal(outcome, wanted):
            return f"rank {rank} has {outcome!r}, not {wanted!r}"
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)


def _difference(first: Run, second: Run) -> str:
    pairs = zip(first.trace, second.trace, strict=False)
    number, lines = next(((n, p) for n, p in enumerate(pairs, 1) if p[0] != p[1]), (None, None))
    if lines is None:
        return f"one has {len(first.trace)} lines, the other {len(second.trace)}"
    return f"line {number} is {lines[0]!r}, then {lines[1]!r}"
