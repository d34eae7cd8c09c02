"""Exhaustive proof that an algorithm is correct, cannot deadlock and has its declared cost."""

from __future__ import annotations

from typing import NamedTuple

from unisono.collectives.algorithms import Algorithm, AlgorithmFile, algorithm_of
from unisono.collectives.algorithms.algorithm import FREE_CHUNKS, balanced, default_chunks, goal, start
from unisono.collectives.algorithms.step import Cost, Move, elements
from unisono.collectives.verify.rank_model import (
    NOTHING,
    AlgorithmError,
    ChunkState,
    RankModel,
    ReductionTrees,
    named,
    ranks_text,
)
from unisono.core.collective import family_of

__all__ = ["AlgorithmError", "ModelChecker", "Proof", "verify"]


class Proof(NamedTuple):
    """Result of a proof for a given number of ranks.

    Attributes:
        cost: Cost counted for a message with one element per chunk.
        scratch: Memory needed beyond the caller's, in chunks, on the rank that needs the most.
        same_bits: Whether all ranks reduce each result in the same tree, and so get the same bits.
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
    """Run an algorithm on `size` ranks, with sets of contributions instead of numbers.

    Proves for `size` ranks that:

    - each result contains every contribution exactly once (in a barrier, at least once);
    - all ranks of an all_reduce get the same bits, unless the algorithm's file declares otherwise;
    - no rank deadlocks, even if sends are never buffered or messages are cut into segments;
    - no step overwrites data that it sends; and
    - the declared cost equals the counted cost, whether or not the message divides evenly into chunks.

    Args:
        collective: Name of a collective, such as "all_reduce". A rooted collective has rank 0 as its root.
        algorithm: An algorithm's name; an `AlgorithmFile`, such as a module in `algorithms/<collective>/`; or an
            `Algorithm` with its options.
        size: Number of ranks, at least 1.

    Returns:
        The counted cost, and other properties of the algorithm.

    Raises:
        AlgorithmError: The algorithm is wrong; the message names the rank, step and chunk.
        ValueError: There is no such collective or algorithm, or the algorithm does not serve this number of ranks.

    Cost: about 10 us per message, so about 0.1 s for a ring of 64 ranks.

    Example:
        >>> un.algorithms.verify("all_reduce", "ring", size=4).cost
        Cost(rounds=6, messages=6, sent=6)
    """
    family_of(collective)
    if size < 1:
        raise ValueError(f"a group must have at least 1 rank, not {size}")
    algorithm = algorithm_of(collective, algorithm, size)
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
    return Proof(_counted(checker, algorithm.parts(size)), scratch, same_bits, is_balanced)


def _check_chunks(checker: ModelChecker) -> None:
    collective = checker.collective
    usual = default_chunks(checker.collective, checker.size)
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
    """Return whether all ranks reduce results in the same trees, and whether these trees are balanced."""
    if not family_of(checker.collective).reduces:
        return True, True
    leaves = [checker.trees.leaf(rank) for rank in range(checker.size)]
    wanted = balanced(leaves, checker.trees.plus)
    found = dict[int, int]()
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
    # In an all_to_all, chunk n is as long as part n % `parts`. This is true even of scratch chunks, because algorithms
    # use them only if all parts are equally long.
    lengths = (lengths * (checker.chunks // parts + 1))[: checker.chunks]
    return Cost(
        max(model.rounds for model in checker.models),
        max(model.messages for model in checker.models),
        max(sum(times * lengths[chunk] for chunk, times in model.sent.items()) for model in checker.models),
    )


def _check_cost(algorithm: Algorithm, checker: ModelChecker, numel: int) -> None:
    counted = _counted(checker, numel)
    declared = algorithm.cost(checker.size, numel)
    for name, unit in (("rounds", "rounds"), ("messages", "messages"), ("sent", f"of {numel} elements sent")):
        if getattr(declared, name) != getattr(counted, name):
            raise _error(
                checker, f"cost declares {getattr(declared, name)} {unit}; counted are {getattr(counted, name)}"
            )


def _error(checker: ModelChecker, message: str) -> AlgorithmError:
    return AlgorithmError(f"among {checker.size} ranks {message}", size=checker.size, operation=checker.collective)


_Key = tuple[int, int]


class ModelChecker:
    """Simulation of an algorithm on all ranks, from the collective's initial state to the last step.

    Args:
        algorithm: The algorithm.
        size: Number of ranks.

    Attributes:
        models: Models of the ranks, in order.
        chunks: Number of chunks on each rank.
        trees: The reduction trees that occur in chunks.

    Example:
        >>> from unisono.collectives.algorithms import find
        >>> checker = ModelChecker(find("all_reduce", "ring"), size=3)
        >>> checker.run()
        >>> checker.trees.text(checker.models[1].chunks[0].tree)
        '(0+(1+2))'
    """

    def __init__(self, algorithm: Algorithm, size: int) -> None:
        self.collective: str = algorithm.collective
        self.size = size
        self.chunks: int = algorithm.chunks(size)
        self.trees: ReductionTrees = ReductionTrees()
        self.models: list[RankModel] = [self._model(algorithm, rank) for rank in range(size)]

    def _model(self, algorithm: Algorithm, rank: int) -> RankModel:
        owned = [start(self.collective, rank, chunk, self.size) for chunk in range(self.chunks)]
        held = [ChunkState(bit, self.trees.leaf(bit.bit_length() - 1)) if bit else NOTHING for bit in owned]
        steps = algorithm.steps(rank, self.size)
        return RankModel(rank, self.size, self.collective, steps, held, self.trees)

    def run(self) -> None:
        """Run all ranks to the end. Raises AlgorithmError if a step is wrong or ranks deadlock."""
        for model in self.models:
            model.begin()
        while self._sweep():
            pass
        if any(model.step for model in self.models):
            raise self._deadlock_error()

    def _sweep(self) -> bool:
        """Run every step that is possible now; return whether any was possible."""
        happened = False
        seen = set[int]()
        for model in self.models:
            if model.step and model.rank not in seen:
                group = self._matching_steps(model)
                seen.update(group)
                if not any(self._unmatched(member) for member in group.values()):
                    self.exchange(group)
                    happened = True
        return happened

    def _matching_steps(self, model: RankModel) -> dict[int, RankModel]:
        """Return, by rank, `model` and all models whose steps exchange messages with its step, directly or not."""
        group = {model.rank: model}
        queue = [model]
        for member in queue:
            for moves, verb in ((member.sends, "send"), (member.recvs, "receive")):
                for key in moves:
                    if key[0] not in group and self._answer(member, verb, key):
                        group[key[0]] = self.models[key[0]]
                        queue.append(self.models[key[0]])
        return group

    def _answer(self, model: RankModel, verb: str, key: _Key) -> Move | None:
        partner = self.models[key[0]]
        return (partner.recvs if verb == "send" else partner.sends).get((model.rank, key[1]))

    def _unmatched(self, model: RankModel) -> list[tuple[str, Move]]:
        moves = [("receive", *item) for item in model.recvs.items()] + [("send", *item) for item in model.sends.items()]
        return [(verb, move) for verb, key, move in moves if not self._answer(model, verb, key)]

    def exchange(self, group: dict[int, RankModel]) -> None:
        """Run a step of each of these models, all of whose messages match.

        Args:
            group: The models by rank, before the step.
        """
        ended = []
        for model in group.values():
            arrived = [(move, self._sent(self.models[key[0]], model, key, move)) for key, move in model.recvs.items()]
            latest = max(model.rounds, *(self.models[key[0]].rounds for key in (*model.sends, *model.recvs)))
            ended.append((model, arrived, latest + 1))
        for model, arrived, rounds in ended:
            model.end(arrived, rounds)
        for model, _, _ in ended:
            model.begin()

    def _sent(self, source: RankModel, target: RankModel, key: _Key, recv: Move) -> list[ChunkState]:
        send = source.sends[target.rank, key[1]]
        # In an all_to_all, the sender and the receiver may use different chunk numbers for the same part.
        alike = len(send.chunks) == len(recv.chunks) if self.collective == "all_to_all" else send.runs == recv.runs
        if not alike:
            sent = f"rank {source.rank}, which in its step {source.number} sends {named(send)}"
            raise target.error(f"{named(recv)} is expected from {sent}")
        return [source.chunks[chunk] for chunk in send.chunks]

    def _deadlock_error(self) -> AlgorithmError:
        """Return an error that names waiting ranks and the peers that they are waiting for."""
        waiting = [(model, *unmatched) for model in self.models for unmatched in self._unmatched(model)]
        for model, verb, move in waiting:
            partner = self.models[move.peer]
            if not partner.step:
                return model.error(f"waits to {_describe(verb, move)}, which ended after its step {partner.number}")
        listed = [
            f"rank {model.rank} in its step {model.number} to {_describe(verb, move)}, "
            f"which is in its step {self.models[move.peer].number}"
            for model, verb, move in waiting[:4]
        ]
        more = f"; and {len(waiting) - 4} more" if len(waiting) > 4 else ""
        return waiting[0][0].error(f"deadlock of waiting ranks: {'; '.join(listed)}{more}")


def _describe(verb: str, move: Move) -> str:
    return f"{verb} {named(move)} {'to' if verb == 'send' else 'from'} rank {move.peer}"
