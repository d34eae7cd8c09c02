"""The driver of the fuzzer: sends programs to a pool of ranks, and compares what they found with the oracle.

`python tests/fuzz/averager_fuzzing.py SEED BACKEND SIZE [compiled]` runs one seed, and prints its program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pprint import pformat

import torch
from averager_changes import CHANGES, HARMLESS
from averager_generator import draw
from averager_oracle import difference, expected
from averager_programs import Case
from averager_ranks import Averager, Outcome, run_batch

import unisono as un
from unisono.testing import pool

__all__ = ["drawn", "failures"]

_BATCH = 20
_COMPILING_S = 200.0
"""Timeout of ranks whose models are compiled: one may still compile when another one is done."""


def drawn(seed: int, backend: str, size: int, *, compiled: bool = False) -> Case:
    """The program of a seed; switches of the whole process are for ranks that have one each."""
    kinds = tuple(kind for kind in CHANGES if backend != "thread" or "conversion" not in kind)
    return draw(seed, size, compiled=compiled, changes=kinds)


def failures(
    seeds: Iterable[int],
    backend: str,
    size: int,
    *,
    compiled: bool = False,
    make: Averager = un.GradientAverager,
) -> Iterator[str]:
    """Run the programs of these seeds; one text for each that goes wrong."""
    cases = [drawn(seed, backend, size, compiled=compiled) for seed in seeds]
    while cases:
        number = 1 if compiled else _BATCH
        batch, cases = cases[:number], cases[number:]
        if compiled:
            # It compiles one function for a few kinds of arguments only.
            torch.compiler.reset()
        outcomes = _run(batch, backend, size, make)
        done = len(outcomes)
        for case, by_rank in zip(batch, outcomes, strict=False):
            problem = _problem(case, by_rank)
            if problem is not None:
                yield _text(case, backend, problem)
        cases = batch[done:] + cases


def _run(batch: Sequence[Case], backend: str, size: int, make: Averager) -> list[list[Outcome]]:
    """The outcomes by rank of the first programs, up to the last one that ranks ran."""
    ranks = pool(backend, 3, **({"timeout": _COMPILING_S} if batch[0].compiled else {}))
    try:
        by_rank = ranks.run(run_batch, batch, make, size=size)
    except Exception as error:
        if len(batch) > 1:
            return _run(batch[:1], backend, size, make)
        return [[Outcome(problem=f"the ranks ended by {error!r}")] * size]
    found = [list(outcomes) for outcomes in zip(*by_rank, strict=False)]
    if any(outcome.apart for outcome in found[-1]):
        ranks.close()
    return found


def _problem(case: Case, by_rank: Sequence[Outcome]) -> str | None:
    problems = [f"rank {rank}: {o.problem}" for rank, o in enumerate(by_rank) if o.problem is not None]
    if problems:
        return "\n".join(problems)
    wrong = _wrong_ends(case, by_rank)
    if wrong is not None:
        return wrong
    for number, wanted in enumerate(expected(case)):
        if case.change is not None and number == min(len(outcome.records) for outcome in by_rank):
            # After a change of the model a pass that ends in an error leaves no record.
            return None
        found = [outcome.records[number] for outcome in by_rank]
        present = [record for record in found if record is not None]
        for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
            wrong = None if one is None or other is None else difference(case, one, other, present[0])
            if wrong is not None:
                return f"rank {rank}, pass {number}: {wrong}"
    return None


def _wrong_ends(case: Case, by_rank: Sequence[Outcome]) -> str | None:
    """Describe a wrong end of the pass after a change of the model."""
    ends = [outcome.change for outcome in by_rank]
    if case.change is None or set(ends) == {"error"}:
        return None
    unchanged = ["refused" if rank in case.change.ranks else "success" for rank in range(case.size)]
    if ends == unchanged or (case.change.kind in HARMLESS and set(ends) == {"success"}):
        return None
    return f"after {case.change}, ranks end with {ends}"


def _text(case: Case, backend: str, problem: str) -> str:
    compiled = " compiled" if case.compiled else ""
    command = f"python tests/fuzz/averager_fuzzing.py {case.seed} {backend} {case.size}{compiled}"
    return f"seed {case.seed}, {case.size} ranks on {backend}{compiled}: {problem}\nTo run it again: {command}"


def main(seed: str, backend: str = "thread", size: str = "2", compiled: str = "") -> None:
    print(pformat(drawn(int(seed), backend, int(size), compiled=bool(compiled)), width=120))
    print(next(failures([int(seed)], backend, int(size), compiled=bool(compiled)), "It passes."))


if __name__ == "__main__":
    main(*sys.argv[1:])
