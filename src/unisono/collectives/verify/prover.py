"""Exhaustive proof that an algorithm is correct, cannot deadlock, and has its declared cost."""

from __future__ import annotations

from typing import NamedTuple

from unisono.collectives.algorithms import Algorithm, AlgorithmFile, find
from unisono.collectives.algorithms.algorithm import FREE_CHUNKS, Cost, balanced, default_chunks, elements, goal
from unisono.collectives.verify.model_checker import ModelChecker
from unisono.collectives.verify.rank_model import AlgorithmError, RankModel, ranks_text
from unisono.core.collective import family_of

__all__ = ["AlgorithmError", "Proof", "verify"]


class Proof(NamedTuple):
    """Result of a proof for one number of ranks.

    Attributes:
        cost: Counted cost of a message of one element a chunk.
        scratch: Chunks of memory beyond the caller's that the busiest rank needs.
        same_bits: Whether all ranks end with the same reduction trees, and so with the same bits.
        balanced: Whether each result is reduced in the balanced binary tree over all ranks, in ascending order.

    Example:
        >>> verify("all_reduce", "recursive_doubling", size=4)
        Proof(cost=Cost(rounds=2, messages=2, sent=2), scratch=1, same_bits=True, balanced=True)
    """

    cost: Cost
    scratch: int
    same_bits: bool
    balanced: bool


def verify(collective: str, algorithm: str | AlgorithmFile | Algorithm, size: int) -> Proof:
    """Run an algorithm among `size` ranks on sets of contributions instead of numbers.

    Proves for this size: every contribution that belongs to a result enters it exactly once (in a barrier, at least
    once); all ranks of an all_reduce end with the same bits, unless the file declares that they do not; no rank
    deadlocks, even if no send is ever buffered, or if messages are cut into segments; no step sends data that it
    overwrites; the declared cost is the counted cost, whether the chunks divide the message or not.

    Args:
        collective: "all_reduce", ...; roots are rank 0.
        algorithm: A name, a file of `algorithms/<collective>/`, or an `Algorithm` with its options.
        size: Number of ranks, from 1.

    Returns:
        What was counted and found.

    Raises:
        AlgorithmError: The algorithm is wrong; names the rank, step and chunk.
        ValueError: No such collective or algorithm, or the algorithm does not serve this number of ranks.

    Cost: about 10 us a message, so some 0.1 s for a ring of 64 ranks.

    Example:
        >>> un.algorithms.verify("all_reduce", "ring", size=4).cost
        Cost(rounds=6, messages=6, sent=6)
    """
    family_of(collective)
    if isinstance(algorithm, str):
        algorithm = find(collective, algorithm)
    elif not isinstance(algorithm, Algorithm):
        algorithm = Algorithm(collective, getattr(algorithm, "__name__", "unnamed").rpartition(".")[2], algorithm)
    if size < 1:
        raise ValueError(f"a group must have at least 1 rank, not {size}")
    if reason := algorithm.unsupported(size):
        raise ValueError(reason)
    checker = ModelChecker(algorithm, size)
    _check_chunks(checker)
    checker.run()
    for model in checker.models:
        _check_contributions(model)
    same_bits, is_balanced = _compare_trees(checker, algorithm.same_bits)
    if algorithm.balanced and not is_balanced:
        raise _error(checker, "sums are not reduced in the balanced tree, which the file declares: BALANCED")
    uneven = () if algorithm.uniform else (checker.chunks + 1, 3 * checker.chunks - 1)
    for numel in (checker.chunks, *uneven):
        _check_cost(algorithm, checker, numel)
    scratch = max(model.landing for model in checker.models)
    if collective == "all_to_all":
        scratch += checker.chunks - 2 * size
    parts = size if collective == "all_to_all" else checker.chunks
    return Proof(_counted(checker, parts), scratch, same_bits, is_balanced)


def _check_chunks(checker: ModelChecker) -> None:
    collective, usual = checker.collective, default_chunks(checker.collective, checker.size)
    enough = checker.chunks >= usual if collective == "all_to_all" else checker.chunks == usual
    if checker.chunks < 1 or not (enough or collective in FREE_CHUNKS):
        raise _error(checker, f"there are {checker.chunks} chunks; this collective needs {usual}")


def _check_contributions(model: RankModel) -> None:
    for chunk, held in enumerate(model.chunks):
        expected = goal(model.collective, model.rank, chunk, model.size)
        if expected and held.members != expected:
            faults = {"lacks": expected & ~held.members, "wrongly has": held.members & ~expected}
            listed = ", ".join(
                f"{fault} the contribution of {_contributors(model, members)}"
                for fault, members in faults.items()
                if members
            )
            step, peer = model.written.get(chunk, (0, 0))
            last = f"; it was last received in step {step}, from rank {peer}" if step else "; it was never received"
            raise model.error(f"after the last step, chunk {chunk} {listed}{last}")


def _contributors(model: RankModel, members: int) -> str:
    if model.collective != "all_to_all":
        return ranks_text(members)
    pairs = [divmod(bit, model.size) for bit in range(members.bit_length()) if members >> bit & 1]
    return ", ".join(f"rank {source} to rank {target}" for source, target in pairs)


def _compare_trees(checker: ModelChecker, declared: bool) -> tuple[bool, bool]:
    """Return whether all ranks' results have the same trees, and whether these are balanced."""
    if not family_of(checker.collective).reduces:
        return True, True
    leaves = [checker.trees.leaf(rank) for rank in range(checker.size)]
    wanted, found = balanced(leaves, checker.trees.plus), dict[int, int]()
    same_bits = is_balanced = True
    for model in checker.models:
        for chunk, held in enumerate(model.chunks):
            if goal(checker.collective, model.rank, chunk, checker.size):
                is_balanced &= held.tree == wanted
                same = found.setdefault(chunk, held.tree) == held.tree
                same_bits &= same
                if declared and not same:
                    raise model.error(
                        f"chunk {chunk} is reduced as {checker.trees.text(held.tree)}, on another rank as "
                        f"{checker.trees.text(found[chunk])}, so its bits may differ; declare SAME_BITS = False"
                    )
    return same_bits, is_balanced


def _counted(checker: ModelChecker, numel: int) -> Cost:
    parts = checker.size if checker.collective == "all_to_all" else checker.chunks
    lengths = [elements(numel, parts, chunk, chunk + 1) for chunk in range(parts)]
    # The chunks of an all_to_all are counted by where they go; scratch is only used by parts of equal length.
    lengths = (lengths * (checker.chunks // parts + 1))[: checker.chunks]
    return Cost(
        max(model.rounds for model in checker.models),
        max(model.messages for model in checker.models),
        max(sum(times * length for times, length in zip(model.sent, lengths, strict=True)) for model in checker.models),
    )


def _check_cost(algorithm: Algorithm, checker: ModelChecker, numel: int) -> None:
    counted, declared = _counted(checker, numel), algorithm.cost(checker.size, numel)
    for name, unit in (("rounds", "rounds"), ("messages", "messages"), ("sent", f"of {numel} elements sent")):
        if getattr(declared, name) != getattr(counted, name):
            raise _error(
                checker, f"cost declares {getattr(declared, name)} {unit}; counted are {getattr(counted, name)}"
            )


def _error(checker: ModelChecker, message: str) -> AlgorithmError:
    return AlgorithmError(f"among {checker.size} ranks {message}", size=checker.size, operation=checker.collective)
