"""The shorter way through shared memory: collectives on plain tensors, with little made anew for each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from unisono.fingerprint import Fingerprint
from unisono.reduction import HALVES, check_reducible, combine, divide, parse_op
from unisono.site import call_site
from unisono.tensors import is_locked
from unisono.transports._again import Repeats, Twice
from unisono.transports._guarded import Turns
from unisono.transports._plain import REDUCING, ROOTED, Key, fingerprint_of, given_by, key_of, of_barrier
from unisono.transports._seen import lasting
from unisono.transports._shm_board import Board
from unisono.transports._shm_calls import FORMS, Form
from unisono.transports._shm_kept import Maker, held, kept_of
from unisono.transports._shm_marks import Mark, mark_for, mark_of, schedule_mark
from unisono.transports._shm_rounds import Rounds
from unisono.types import Call, ReduceOp

__all__ = ["QuickRounds"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_MOST = 256
_BARRIER = mark_of("barrier", ReduceOp.BOR, None, None, ())

_NOTHING_SAID = bytes(24), bytes(24)

_Recipe = tuple[ReduceOp, int, Mark, tuple[list[torch.Tensor], list[torch.Tensor]] | None]


class _Kind(NamedTuple):
    """Calls of one kind, other than all_reduce: what ranks compare, and how they are made."""

    form: Form
    op: ReduceOp | None
    averages: bool
    mark: Mark


class _Later:
    """Ranks agree in the first round of a call, not before it."""

    def reach(self, _said: object, _deadline: float) -> bool:
        return True


class QuickRounds(Repeats):
    """Calls on plain dense tensors: what depends on dtype, lengths, operation and root alone is kept.

    So is all else of those with the very tensors of an earlier call, where it is compiled.
    """

    names = frozenset({"all_reduce", "barrier", *FORMS})

    def __init__(self, board: Board, rounds: Rounds) -> None:
        guarded = Turns()
        super().__init__(_Later(), guarded)
        self._board, self._rounds, self._maker = board, rounds, Maker(board, rounds, guarded)
        self._recipes: dict[tuple[str, torch.dtype, int], _Recipe] = {}
        self._kinds: dict[Key, _Kind] = {}
        self._twice = Twice()

    def fingerprint(self) -> Fingerprint | None:
        """Of the call that is being made this way, if any."""
        told = self._maker.now
        return None if told is None else told(site=call_site())

    def _anew(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        try:
            if name == "all_reduce":
                return self._all_reduce(target, op, deadline)
            if name != "barrier":
                return self._other(name, target, source, op, root, deadline)
            self._maker.now = of_barrier
            self._rounds.first(_BARRIER, deadline)
            return True
        finally:
            self._maker.now = None

    def _explained(self, error: BaseException) -> BaseException:
        return error

    def _divided(self, target: Any) -> bool:
        divide(target, self._board.size)
        return True

    def _all_reduce(self, tensor: Any, op: str, deadline: float) -> bool:
        # As `is_plain`, for which there is less than a microsecond; complex tensors are refused by their dtype.
        if type(tensor) not in _PLAIN or tensor.requires_grad or tensor.layout is not _STRIDED:
            return False
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
            return False
        if is_locked(tensor):
            return False
        key = (op, tensor.dtype, tensor.numel())
        recipe = self._recipes.get(key) or self._prepare(key)
        if recipe is None:
            return False
        by, divisor, mark, stages = recipe
        self._maker.now = told = partial(_of_all_reduce, op, tensor.dtype, tensor.shape)
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        if stages is None or self._rounds.may_lie_in_place(tensor.nbytes):
            # Where it lies in shared memory, an average is divided on the way.
            self._rounds.all_reduce(flat, ReduceOp.AVG if divisor else by, mark, deadline)
            divisor = 0
        else:
            self._at_once(flat, by, mark, stages, deadline)
            if self._twice("all_reduce", op, None, id(tensor), id(None)):
                call = Call(name="all_reduce", inputs=(flat,), outputs=(flat,), op=by)
                self._keep(("all_reduce", tensor, None, op, None), call, mark, told, divisor)
        if divisor:
            divide(flat, divisor)
        return True

    def _at_once(
        self,
        flat: torch.Tensor,
        op: ReduceOp,
        mark: Mark,
        stages: tuple[list[torch.Tensor], list[torch.Tensor]],
        deadline: float,
    ) -> None:
        """Of what fits into a stage: all lay it ready, and each rank reads all."""
        board = self._board
        views = stages[(board.round + 1) & 1]
        self._rounds.laying.lay(views[board.rank], flat)
        self._rounds.first(mark, deadline)
        if self._rounds.sums(op, flat.dtype):
            rows = [flat if rank == board.rank else view for rank, view in enumerate(views)]
            self._rounds.laying.sum(rows, flat, None)
        elif op is ReduceOp.SUM and board.size == 2:
            # Adding in place is the fastest; in the order of ranks.
            low, high = (views[0], flat) if board.rank else (flat, views[1])
            torch.add(low, high, out=flat)
        else:
            combine(op, views[0], views[1], flat)
            for view in views[2:]:
                combine(op, flat, view, flat)

    def _other(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        key = key_of(name, target, source, op, root)
        kind = None if key is None else self._kinds.get(key) or self._kind(key, target, source)
        sides = None if kind is None else kind.form.sides(target, source)
        if key is None or kind is None or sides is None:
            return False
        form, shape = kind.form, given_by(name, target, source).shape
        self._maker.now = told = partial(fingerprint_of, key, form.counts, form.sends, form.receives, shape)
        call = form.made(sides, kind.op, root, averages=kind.averages)
        getattr(self._rounds, form.call)(call, kind.mark, deadline)
        divisor = self._board.size if kind.averages and call.outputs else 0
        if divisor:
            divide(call.outputs[0], divisor)
        if self._twice(name, op, root, id(target), id(source)):
            self._keep((name, target, source, op, root), call, kind.mark, told, divisor)
        return True

    def _keep(
        self,
        asked: tuple[str, Any, Any, str, int | None],
        call: Call,
        mark: Mark,
        told: Callable[..., Fingerprint],
        divisor: int,
    ) -> None:
        """Make it so from the next time on, if it can be."""
        name, target, source, op, root = asked
        if not (lasting(target) and lasting(source)):
            return
        again = partial(_again, name, op, root, self._board, held(target), held(source))
        kept = kept_of(self._rounds, call, mark, told, again)
        if kept is not None:
            self.remember(name, target, source, op, root, _NOTHING_SAID, self._maker.make, (kept,), divisor)

    def _kind(self, key: Key, target: Any, source: Any) -> _Kind | None:
        """What calls of this kind need; None if they need more than is done here, or are wrong."""
        name, op_name, root, dtype, *counts = key
        rank, size = self._board.rank, self._board.size
        rootless = name in ROOTED and not (root is not None and 0 <= root < size)
        if rootless or not any(map(sum, counts)):
            return None
        op, averages = None, False
        if name in REDUCING:
            op = parse_op(op_name)
            check_reducible(op, dtype)
            averages = op is ReduceOp.AVG
            if averages and dtype in HALVES:
                # They are divided first.
                return None
        form = FORMS[name](key, rank, size)
        sides = None if form is None else form.sides(target, source)
        if form is None or sides is None:
            return None
        asked = ReduceOp.SUM if averages else op
        if form.sends:
            mark = schedule_mark(fingerprint_of(key, form.counts, form.sends, form.receives))
        else:
            mark = mark_for(form.made(sides, asked, root, averages=averages))
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
        kind = self._kinds[key] = _Kind(form, asked, averages, mark)
        return kind

    def _prepare(self, key: tuple[str, torch.dtype, int]) -> _Recipe | None:
        """What calls of this kind need; None if they need more preparation than is made here."""
        name, dtype, count = key
        op = parse_op(name)
        check_reducible(op, dtype)
        if (op is ReduceOp.AVG and dtype in HALVES) or dtype.is_complex:
            # Halves are divided first, and a complex tensor may be a conjugate view.
            return None
        by, divisor = (ReduceOp.SUM, self._board.size) if op is ReduceOp.AVG else (op, 0)
        stages = None
        if count * dtype.itemsize <= self._rounds.one_shot_bytes:
            stages = (self._rounds.heads(0, dtype, count), self._rounds.heads(1, dtype, count))
        if len(self._recipes) >= _MOST:
            self._recipes.clear()
        recipe = by, divisor, mark_of("all_reduce", op, dtype, None, (count,)), stages
        self._recipes[key] = recipe
        return recipe


def _of_all_reduce(op: str, dtype: torch.dtype, shape: torch.Size, site: str | None = None) -> Fingerprint:
    counts = (shape.numel(),)
    return fingerprint_of(("all_reduce", op, None, dtype, counts, ()), counts, shape=shape, site=site)


def _again(
    name: str, op: str, root: int | None, board: Board, target: Callable[[], Any], source: Callable[[], Any]
) -> Call:
    """The call of an all_to_all, from its tensors."""
    given = target(), source()
    key = key_of(name, *given, op, root)
    form = None if key is None else FORMS[name](key, board.rank, board.size)
    sides = None if form is None else form.sides(*given)
    assert form is not None
    assert sides is not None
    return form.made(sides, None, root, averages=False)
