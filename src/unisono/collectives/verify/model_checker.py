"""Model of all ranks of a schedule, without buffering; connected steps happen together or not at all.

A step happens when each of its moves matches its counterpart in the peer's current step, and the
peer's step can happen too. This is stricter than a send that waits for its receive. It makes a
schedule safe to pipeline: if messages are cut into segments and the number in flight is limited, a third
rank that blocks the last segment of a step blocks all steps connected with it.
"""

from __future__ import annotations

from unisono.collectives.algorithms.semantics import chunks_of, start
from unisono.collectives.algorithms.step import Algorithm, Move
from unisono.collectives.verify.rank_model import AlgorithmError, Contribution, RankModel

__all__ = ["ModelChecker"]


class ModelChecker:
    """Simulation of every rank of a schedule, from the initial state of the collective to the last step.

    Attributes:
        places: The ranks, in order.
        chunks: How many chunks each has.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> checker = ModelChecker("all_reduce", ring, size=3)
        >>> checker.run()
        >>> [model.number for model in checker.models]
        [4, 4, 4]
    """

    def __init__(self, collective: str, schedule: Algorithm, size: int) -> None:
        self.collective, self.size = collective, size
        self.chunks = chunks_of(schedule, collective, size)
        self.models = [self._model(schedule, rank) for rank in range(size)]

    def _model(self, schedule: Algorithm, rank: int) -> RankModel:
        owners = [start(self.collective, rank, chunk, self.size) for chunk in range(self.chunks)]
        held = [Contribution(once=owner, twice=0, formula=owner) for owner in owners]
        return RankModel(rank, self.size, self.collective, schedule.steps(rank, self.size), held)

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
            for verb, move in member.moves:
                if move.peer not in group and self._answer(member, verb, move):
                    group[move.peer] = self.models[move.peer]
                    queue.append(self.models[move.peer])
        return group

    def _answer(self, model: RankModel, verb: str, move: Move) -> Move | None:
        partner = self.models[move.peer]
        return (partner.recvs if verb == "send" else partner.sends).get(model.rank)

    def _unmatched(self, model: RankModel) -> list[tuple[str, Move]]:
        return [(verb, move) for verb, move in model.moves if not self._answer(model, verb, move)]

    def _exchange(self, group: dict[int, RankModel]) -> None:
        ended = []
        for model in group.values():
            arrived = [(move, self._sent(self.models[peer], model, move)) for peer, move in model.recvs.items()]
            latest = max(model.rounds, *(self.models[move.peer].rounds for _, move in model.moves))
            ended.append((model, arrived, latest + 1))
        for model, arrived, rounds in ended:
            model.end(arrived, rounds)
            model.begin()

    def _sent(self, source: RankModel, target: RankModel, recv: Move) -> list[Contribution]:
        send = source.sends[target.rank]
        self._check_match(source, send, target, recv)
        return source.chunks[send.start : send.stop]

    def _check_match(self, source: RankModel, send: Move, target: RankModel, recv: Move) -> None:
        expected = send.start, send.stop
        if self.collective == "all_to_all":
            if expected != (target.rank, target.rank + 1):
                raise source.error(
                    f"{_named(send)} goes to rank {target.rank}; only chunk {target.rank} is meant for it"
                )
            expected = self.size + source.rank, self.size + source.rank + 1
        if expected != (recv.start, recv.stop):
            sent = f"rank {source.rank}, which in its step {source.number} sends {_named(send)}"
            raise target.error(f"{_named(recv)} is expected from {sent}")

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
    return f"{verb} {_named(move)} {'to' if verb == 'send' else 'from'} rank {move.peer}"


def _named(move: Move) -> str:
    return f"chunk {move.start}" if move.stop == move.start + 1 else f"chunks {move.start} to {move.stop - 1}"
