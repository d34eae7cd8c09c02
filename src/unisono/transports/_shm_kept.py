"""What is kept of calls through shared memory whose tensors come again: which bytes go where, in few calls of C.

A kept call is for messages that fit into one stage. It lays at the same places as `Rounds` does, since other ranks may
take that way.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from unisono.fingerprint import Fingerprint
from unisono.reduction import SUMS
from unisono.transports._guarded import Guarded
from unisono.transports._shm_board import Board
from unisono.transports._shm_marks import Mark
from unisono.transports._shm_reductions import IN_PLACE_BYTES
from unisono.transports._shm_rounds import Rounds
from unisono.types import Call

__all__ = ["Kept", "Maker", "held", "kept_of"]

_PIECE = struct.Struct("=3q")

_Piece = tuple[int, int, int]
"""To an address, from one, so many bytes."""
_Sum = tuple[tuple[int, ...], int, int, int, int]
"""The arguments of `Storing.sum`."""


class _Half(NamedTuple):
    """What is done where the stages of one half are in turn.

    Attributes:
        laid: Before this rank arrives.
        then: What is called when all have arrived, and its argument.
    """

    laid: bytes | None
    then: tuple[Callable[..., object], tuple[Any, ...]] | None


class Kept(NamedTuple):
    """A call that is made again. It holds no tensor.

    Attributes:
        mark: For the round.
        halves: By the number of a round.
        paired: Whether the last words of all ranks' marks tell if it is this call.
        again: The call, if it turns out to be another one.
        told: What ranks compare, but for the line.
    """

    mark: Mark
    halves: tuple[_Half, _Half]
    paired: bool
    again: Callable[[], Call]
    told: Callable[..., Fingerprint]


class Maker:
    """Makes such calls.

    Args:
        rounds: Of the ranks.
        guarded: Knows the deadline of a call.

    Attributes:
        now: Tells of the call that is being made.
    """

    def __init__(self, board: Board, rounds: Rounds, guarded: Guarded) -> None:
        self._board, self._rounds, self._guarded = board, rounds, guarded
        self.now: Callable[..., Fingerprint] | None = None

    def make(self, kept: Kept) -> None:
        """On all ranks."""
        board, deadline = self._board, self._guarded.deadline
        assert deadline is not None
        laid, then = kept.halves[(board.round + 1) & 1]
        self.now = kept.told
        try:
            if laid is not None:
                self._rounds.laying.storing.lay(laid)
            self._rounds.first(kept.mark, deadline)
            if kept.paired and board.extras() != [kept.mark[3]] * board.size:
                self._rounds.uneven(kept.again(), deadline)
            elif then is not None:
                then[0](*then[1])
        finally:
            self.now = None


def kept_of(
    rounds: Rounds,
    call: Call,
    mark: Mark,
    told: Callable[..., Fingerprint],
    again: Callable[[], Call],
) -> Kept | None:
    """None if it is made otherwise: longer messages, other sums, and all where nothing is compiled.

    Args:
        rounds: Of the ranks.
        call: Which. Its tensors' memory is told, and they are not held.
        mark, told, again: As of `Kept`.
    """
    storing, plan = rounds.laying.storing, _PLANS[call.name]
    if storing is None:
        return None
    halves = []
    for half in (0, 1):
        found = plan(rounds, call, [stage[half].data_ptr() for stage in rounds.stages])
        if found is None:
            return None
        laid, taken, total = found
        then = (storing.sum, total) if total else (storing.take, (_packed(taken),)) if taken else None
        halves.append(_Half(_packed(laid) if laid else None, then))
    paired = call.name == "all_to_all"
    if paired:
        mark = (*mark[:3], call.inputs[0].numel() + 1)
    return Kept(mark, (halves[0], halves[1]), paired, again, told)


def held(given: Any) -> Callable[[], Any]:
    """What gives tensors, or a list of some, again while somebody else holds them."""
    if given is None:
        return lambda: None
    if isinstance(given, torch.Tensor):
        return weakref.ref(given)
    known = [weakref.ref(one) for one in given]
    return lambda: [one() for one in known]


_Plan = tuple[list[_Piece], list[_Piece], "_Sum | None"]
"""What is laid, and what is taken or summed then."""


def _broadcast(rounds: Rounds, call: Call, stages: Sequence[int]) -> _Plan | None:
    tensor, root = call.outputs[0], call.root or 0
    if tensor.nbytes > rounds.stage_bytes:
        return None
    if rounds.rank == root:
        return [(stages[root], tensor.data_ptr(), tensor.nbytes)], [], None
    return [], [(tensor.data_ptr(), stages[root], tensor.nbytes)], None


def _collect(rounds: Rounds, call: Call, stages: Sequence[int]) -> _Plan | None:
    source, rank = call.inputs[0], rounds.rank
    if max(t.nbytes for t in (source, *call.outputs)) > rounds.stage_bytes:
        return None
    laid = [(stages[rank], source.data_ptr(), source.nbytes)]
    taken = [
        (t.data_ptr(), source.data_ptr() if r == rank else stages[r], t.nbytes) for r, t in enumerate(call.outputs)
    ]
    return [] if call.root == rank else laid, taken, None


def _scatter(rounds: Rounds, call: Call, stages: Sequence[int]) -> _Plan | None:
    target, root, rank = call.outputs[0], call.root or 0, rounds.rank
    step = rounds.piece(1)
    if target.nbytes > step:
        return None
    if rank != root:
        return [], [(target.data_ptr(), stages[root] + rank * step, target.nbytes)], None
    return (
        _laid_for(call.inputs, rank, stages[root], step),
        [(target.data_ptr(), call.inputs[root].data_ptr(), target.nbytes)],
        None,
    )


def _all_to_all(rounds: Rounds, call: Call, stages: Sequence[int]) -> _Plan | None:
    rank, step = rounds.rank, rounds.piece(1)
    lengths = {t.nbytes for t in (*call.inputs, *call.outputs)}
    if len(lengths) > 1 or max(lengths) > step:
        return None
    taken = [
        (t.data_ptr(), call.inputs[r].data_ptr() if r == rank else stages[r] + rank * step, t.nbytes)
        for r, t in enumerate(call.outputs)
    ]
    return _laid_for(call.inputs, rank, stages[rank], step), taken, None


def _all_reduce(rounds: Rounds, call: Call, stages: Sequence[int]) -> _Plan | None:
    tensor, rank = call.inputs[0], rounds.rank
    if not _summed(rounds, call) or tensor.nbytes >= IN_PLACE_BYTES:
        return None
    at, nbytes, width = tensor.data_ptr(), tensor.nbytes, tensor.element_size()
    rows = tuple(at if r == rank else stage for r, stage in enumerate(stages))
    return [(stages[rank], at, nbytes)], [], (rows, at, 0, nbytes, width)


def _reduce(rounds: Rounds, call: Call, stages: Sequence[int]) -> _Plan | None:
    tensor, rank = call.inputs[0], rounds.rank
    most = rounds.stage_bytes if rounds.size == 2 else rounds.one_shot_bytes
    if not _summed(rounds, call) or tensor.nbytes > most:
        return None
    if rank != call.root:
        return [(stages[rank], tensor.data_ptr(), tensor.nbytes)], [], None
    rows = tuple(tensor.data_ptr() if r == rank else stage for r, stage in enumerate(stages))
    return [], [], (rows, tensor.data_ptr(), 0, tensor.nbytes, tensor.element_size())


def _reduce_scatter(rounds: Rounds, call: Call, stages: Sequence[int]) -> _Plan | None:
    target, rank, width = call.outputs[0], rounds.rank, call.outputs[0].element_size()
    step = rounds.piece(width) * width
    if not _summed(rounds, call) or max(t.nbytes for t in call.inputs) > step:
        return None
    rows = tuple(call.inputs[r].data_ptr() if r == rank else stage + rank * step for r, stage in enumerate(stages))
    return _laid_for(call.inputs, rank, stages[rank], step), [], (rows, target.data_ptr(), 0, target.nbytes, width)


def _summed(rounds: Rounds, call: Call) -> bool:
    return call.op in SUMS and rounds.size > 1 and rounds.laying.sums(call.inputs[0].dtype)


def _laid_for(inputs: Sequence[torch.Tensor], rank: int, stage: int, step: int) -> list[_Piece]:
    """For each other rank what is for that one."""
    return [(stage + r * step, t.data_ptr(), t.nbytes) for r, t in enumerate(inputs) if r != rank and t.nbytes]


def _packed(pieces: Sequence[_Piece]) -> bytes:
    return b"".join(_PIECE.pack(*piece) for piece in pieces)


_PLANS: dict[str, Callable[[Rounds, Call, Sequence[int]], _Plan | None]] = {
    "all_gather": _collect,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _collect,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}
