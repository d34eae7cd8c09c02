"""Exhaustive proof that a schedule is correct, cannot deadlock, and has its declared cost."""

from __future__ import annotations

from fractions import Fraction

from unisono.collectives.algorithms.semantics import default_chunks, goal
from unisono.collectives.algorithms.step import Algorithm, Cost
from unisono.collectives.verify.model_checker import ModelChecker
from unisono.collectives.verify.rank_model import AlgorithmError, RankModel

__all__ = ["AlgorithmError", "count", "verify"]

_FREE_CHUNKS = {"all_reduce", "broadcast", "reduce"}


def verify(collective: str, schedule: Algorithm, size: int) -> Cost:
    """Run a schedule among `size` ranks on sets of contributions instead of numbers; return its counted cost.

    Proves for this size: every contribution that belongs to a result enters it exactly once
    (in a barrier, at least once); all ranks of an all_reduce end with the same bits; no rank deadlocks,
    even if no send is ever buffered, or if messages are cut into segments; no step sends data that
    it overwrites; `schedule.cost` is the counted cost.

    Args:
        collective: "all_reduce", ...; roots are rank 0.
        schedule: A module of `algorithms/<collective>/`, or anything with its functions.
        size: Number of ranks, from 1.

    Returns:
        Rounds and bytes, as counted.

    Raises:
        AlgorithmError: The schedule is wrong; names the rank, step and chunk.
        ValueError: No such collective.

    Cost: about 10 us a message, so some 0.1 s for a ring of 64 ranks.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> verify("all_reduce", ring, size=4)
        Cost(rounds=6, sent=Fraction(3, 2))
    """
    counted, declared = count(collective, schedule, size), schedule.cost(size)
    if declared.rounds != counted.rounds:
        raise _error(collective, size, f"cost declares {declared.rounds} rounds; counted are {counted.rounds}")
    if declared.sent != counted.sent:
        raise _error(collective, size, f"cost declares {declared.sent} of the message sent; counted are {counted.sent}")
    return counted


def count(collective: str, schedule: Algorithm, size: int) -> Cost:
    """Return the counted cost as `verify` does, without a check of the declared cost.

    Example:
        >>> from unisono.collectives.algorithms.barrier import dissemination
        >>> count("barrier", dissemination, size=5)
        Cost(rounds=3, sent=Fraction(3, 1))
    """
    if size < 1:
        raise ValueError(f"a group must have at least 1 rank, not {size}")
    checker = ModelChecker(collective, schedule, size)
    usual = default_chunks(collective, size)
    if checker.chunks < 1 or (checker.chunks != usual and collective not in _FREE_CHUNKS):
        raise _error(collective, size, f"there are {checker.chunks} chunks; this collective needs {usual}")
    checker.run()
    for model in checker.models:
        _check_contributions(model)
        if collective == "all_reduce":
            _check_bits(model, checker.models[0])
    unit = size if collective == "all_to_all" else checker.chunks
    return Cost(
        max(model.rounds for model in checker.models), Fraction(max(model.sent for model in checker.models), unit)
    )


def _check_contributions(model: RankModel) -> None:
    for chunk, held in enumerate(model.chunks):
        expected = goal(model.collective, model.rank, chunk, model.size)
        again = 0 if model.collective == "barrier" else held.twice
        if expected and (held.once != expected or again):
            faults = {"lacks": expected & ~held.once, "wrongly has": held.once & ~expected, "counts twice": again}
            listed = ", ".join(
                f"{fault} the contribution of {_ranks(ranks)}" for fault, ranks in faults.items() if ranks
            )
            raise model.error(f"after the last step, chunk {chunk} {listed}")


def _check_bits(model: RankModel, first: RankModel) -> None:
    for chunk, (held, reference) in enumerate(zip(model.chunks, first.chunks, strict=True)):
        if held.formula != reference.formula:
            raise model.error(f"chunk {chunk} is reduced in another order than on rank 0, so its bits may differ")


def _ranks(contributors: int) -> str:
    numbers = [str(rank) for rank in range(contributors.bit_length()) if contributors >> rank & 1]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _error(collective: str, size: int, message: str) -> AlgorithmError:
    return AlgorithmError(f"among {size} ranks {message}", size=size, operation=collective)
