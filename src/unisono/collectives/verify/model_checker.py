"""Model of all ranks of an algorithm, without buffering; connected steps happen together or not at all.

A step happens when each of its moves matches its counterpart in the peer's current step, and the peer's step can
happen too. This is stricter than a send that waits for its receive. It makes an algorithm safe to pipeline: if messages
are cut into segments and the number in flight is limited, a third rank that blocks the last segment of a step blocks
all steps connected with it.
"""

from __future__ import annotations

from unisono.collectives.algorithms import Algorithm
from unisono.collectives.algorithms.algorithm import Move, start
from unisono.collectives.verify.rank_model import NOTHING, AlgorithmError, Contribution, RankModel, named
from unisono.collectives.verify.reduction_tree import ReductionTrees

__all__ = ["ModelChecker"]

_Key = tuple[int, int]


class ModelChecker:
    """Simulation of every rank of an algorithm, from the initial state of the collective to the last step.

    Args:
        algorithm: The algorithm.
        size: Number of ranks.

    Attributes:
        models: The ranks, in order.
        chunks: How many chunks each has.
        trees: The reduction trees of their chunks.

    Example:
        >>> from unisono.collectives.algorithms import find
        >>> checker = ModelChecker(find("all_reduce", "ring"), size=3)
        >>> checker.run()
        >>> checker.trees.text(checker.models[1].chunks[0].tree)
        '(0+(1+2))'
    """

    def __init__(self, algorithm: Algorithm, size: int) -> None:
        self.collective, self.size = algorithm.collective, size
        self.chunks, self.trees = algorithm.chunks(size), ReductionTrees()
        self.models = [self._model(algorithm, rank) for rank in range(size)]

    def _model(self, algorithm: Algorithm, rank: int) -> RankModel:
        owned = [start(self.collective, rank, chunk, self.size) for chunk in range(self.chunks)]
        held = [Contribution(bit, self.trees.leaf(bit.bit_length() - 1)) if bit else NOTHING for bit in owned]
        steps = algorithm.steps(rank, self.size)
        return RankModel(rank, self.size, self.collective, steps, held, self.trees, self.collective != "barrier")

    def run(self) -> None:
        """Execute all steps that can happen; raise `AlgorithmError` if a step is wrong or a rank deadlocks."""
        for model in self.models:
            model.begin()
        while self._sweep():
            pass
        if any(model.step for model in self.models):
            raise self._deadlock_error()

    def _sweep(self) -> bool:
        """Execute every step that can happen; return whether there was one."""
        happened, seen = False, set[int]()
        for model in self.models:
            if model.step and model.rank not in seen:
                group = self._matching_steps(model)
                seen.update(group)
                if not any(self._unmatched(member) for member in group.values()):
                    self._exchange(group)
                    happened = True
        return happened

    def _matching_steps(self, model: RankModel) -> dict[int, RankModel]:
        """Return the models, by rank, that can take their current step only together with this one."""
        group, queue = {model.rank: model}, [model]
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

    def _exchange(self, group: dict[int, RankModel]) -> None:
        ended = []
        for model in group.values():
            arrived = [(move, self._sent(self.models[key[0]], model, key, move)) for key, move in model.recvs.items()]
            latest = max(model.rounds, *(self.models[key[0]].rounds for key in (*model.sends, *model.recvs)))
            ended.append((model, arrived, latest + 1))
        for model, arrived, rounds in ended:
            model.end(arrived, rounds)
        for model, _, _ in ended:
            model.begin()

    def _sent(self, source: RankModel, target: RankModel, key: _Key, recv: Move) -> list[Contribution]:
        send = source.sends[target.rank, key[1]]
        # An all_to_all moves equally long parts, and may store a part under another number than the sender.
        alike = len(send.chunks) == len(recv.chunks) if self.collective == "all_to_all" else send.runs == recv.runs
        if not alike:
            sent = f"rank {source.rank}, which in its step {source.number} sends {named(send)}"
            raise target.error(f"{named(recv)} is expected from {sent}")
        return [source.chunks[chunk] for chunk in send.chunks]

    def _deadlock_error(self) -> AlgorithmError:
        """Return an error that names each waiting rank and the peer that it waits for."""
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
