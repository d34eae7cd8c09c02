"""The shorter way by MPI: blocking calls on plain dense tensors, with nothing made anew for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unisono.fingerprint import Fingerprint
from unisono.reduction import HALVES, check_reducible, divide, parse_op
from unisono.site import call_site
from unisono.transports._again import Repeats, Twice
from unisono.transports._mpi_agreement import Agreement, Said, word_of
from unisono.transports._mpi_comms import Comms
from unisono.transports._mpi_letters import Letter, letter_for
from unisono.transports._mpi_messages import Messages
from unisono.transports._mpi_native import Native
from unisono.transports._mpi_parts import LONGEST
from unisono.transports._mpi_reductions import is_odd
from unisono.transports._mpi_ways import WAYS, Kind, Way
from unisono.transports._mpi_window import Near
from unisono.transports._plain import PARTED, REDUCING, ROOTED, Key, fingerprint_of, given_by, key_of, of_barrier
from unisono.transports._seen import lasting
from unisono.types import Call, ReduceOp

__all__ = ["QuickCalls"]

_MOST = 256
_NOTHING_SAID = bytes(24), bytes(24)


class _Recipe(NamedTuple):
    """What depends on a call's key alone: what ranks agree on, how it is made, and by what the result is divided."""

    said: Said
    level: Said
    """The same where parts are level."""
    way: Way
    divisor: int
    extreme: ReduceOp | None = None
    """The minimum or maximum, of floats: MPI's own is right where no rank `is_odd`."""


class _Ready(NamedTuple):
    """How a call is made: what ranks agree on for it to be so, MPI's function, and its arguments."""

    recipe: _Recipe
    said: Said
    begin: Callable[..., object]
    arguments: tuple[Any, ...]


class QuickCalls(Repeats):
    """Calls on plain dense tensors: what depends on dtype, lengths, operation and root alone is kept.

    Args:
        differ: What `MpiTransport` does where other ranks came to another call than this one: it raises.
        agreement: Where it is told whether any rank has what a call of MPI would do wrong: then all go the longer way.
        native, messages: Makes the call; carries those of users.
        comms: Of the ranks.
        near: What ranks of one host have beside MPI.
        run: Makes a call that another rank's lengths keep from MPI.
    """

    names = frozenset({*WAYS, "barrier", "send", "recv"})

    def __init__(
        self,
        differ: Callable[[Fingerprint], object],
        agreement: Agreement,
        native: Native,
        messages: Messages,
        comms: Comms,
        near: Near,
        run: Callable[[Call, float], None],
    ) -> None:
        super().__init__(agreement, agreement.page, comms)
        self._differ, self._agreement, self._native, self._messages = differ, agreement, native, messages
        self._comms, self._near, self._run = comms, near, run
        self._size = comms.own.Get_size()
        self._recipes: dict[Key, _Recipe] = {}
        self._twice = Twice()
        self._barrier = agreement.say(word_of(of_barrier().compared()[1:]))

    def _anew(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        if name == "barrier":
            self.remember(name, None, None, op, None, self._barrier, None, (), 0)
            return self._agreement.reach(self._barrier, deadline) or self._unlike(name, None, None, op, None, deadline)
        ready = self._ready(name, target, source, op, root)
        if ready is None:
            return False
        self._consider((name, op, root, id(target), id(source)), target, source, ready)
        odd = ready.recipe.extreme is not None and is_odd(target)
        if not self._agreement.reach(ready.said, deadline, odd):
            self._settled(name, target, source, op, root, deadline)
            return True
        return self._made(target, ready, deadline)

    def _unlike(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        if name == "barrier":
            self._differ(of_barrier(call_site()))
            return True
        ready = self._settled(name, target, source, op, root, deadline)
        # So all ranks say the same the next time.
        self._keep(name, target, source, op, root, ready)
        return True

    def _settled(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> _Ready:
        """Make a call for which ranks have not all said the same; how it is made for parts wherever they lie."""
        ready = self._ready(name, target, source, op, root, level=False)
        assert ready is not None
        agreement, recipe = self._agreement, ready.recipe
        if not agreement.alike:
            self._differ(self._quoted(name, target, source, op, root))
        if agreement.counted and (recipe.way.sends or recipe.extreme is not None):
            self._run(_call(recipe, target, source), deadline)
        else:
            self._made(target, ready, deadline)
        return ready

    def _made(self, target: Any, ready: _Ready, deadline: float) -> bool:
        self._native.make(ready.begin, ready.arguments, deadline)
        return self._divided(target) if ready.recipe.divisor else True

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, self._comms.mpi.Exception):
            return error
        told = self._comms.error_of(error)
        told.__cause__ = error
        return told

    def _divided(self, target: Any) -> bool:
        divide(target, self._size)
        return True

    def _ready(
        self, name: str, target: Any, source: Any, op: str, root: int | None, *, level: bool = True
    ) -> _Ready | None:
        """None if it takes the longer way.

        Args:
            name, target, source, op, root: As `Quick.call` is given them.
            level: Whether it may be made the way for parts of one length side by side, if they lie so here.
        """
        key = key_of(name, target, source, op, root)
        recipe = None if key is None else self._recipes.get(key) or self._prepare(key)
        if recipe is None:
            return None
        arguments = recipe.way.describe(target, source)
        if arguments is None:
            return None
        by = recipe.way.level if level else None
        if by is not None and (simpler := by.simpler(arguments)) is not None:
            return _Ready(recipe, recipe.level, by.begin, simpler)
        return _Ready(recipe, recipe.said, recipe.way.begin, arguments)

    def _consider(self, place: tuple[Any, ...], target: Any, source: Any, ready: _Ready) -> None:
        """Keep it from the second call on, unless other tensors come in the place of those that are gone."""
        if self._twice(*place) and ready.recipe.extreme is None and lasting(target) and lasting(source):
            name, op, root, *_ = place
            self._native.watch.enrol()
            self._keep(name, target, source, op, root, ready)

    def _keep(self, name: str, target: Any, source: Any, op: str, root: int | None, ready: _Ready) -> None:
        self.remember(name, target, source, op, root, ready.said, ready.begin, ready.arguments, ready.recipe.divisor)

    def _addressed(self, name: str, tensor: Any, peer: int, tag: int) -> Letter | None:
        letter = letter_for(self._messages, name, tensor, peer, tag)
        if letter is None:
            return None
        if self._twice(name, tag, peer, id(tensor), id(None)) and lasting(tensor):
            self.remember(name, tensor, None, tag, peer, _NOTHING_SAID, letter, (), 0)
        return letter

    def _quoted(self, name: str, target: Any, source: Any, op: str, root: int | None) -> Fingerprint:
        key = key_of(name, target, source, op, root)
        assert key is not None
        way, shape = self._recipes[key].way, given_by(name, target, source).shape
        return fingerprint_of(key, way.counts, way.sends, way.receives, tuple(shape), call_site())

    def _prepare(self, key: Key) -> _Recipe | None:
        """What calls of this kind need; None if they need more than is done here, or are wrong."""
        name, op_name, root, dtype, targets, sources = key
        rootless = name in ROOTED and not (root is not None and 0 <= root < self._size)
        if rootless or str(dtype).startswith("torch.q"):
            # Such are quantized.
            return None
        element = operation = extreme = None
        averaged = False
        if name in REDUCING:
            op = parse_op(op_name)
            check_reducible(op, dtype)
            if op is ReduceOp.AVG and dtype in HALVES:
                return None
            found = self._native.reductions.plain(dtype, ReduceOp.SUM if op is ReduceOp.AVG else op)
            if found is None and name == "all_reduce":
                found, extreme = self._native.reductions.extreme(dtype, op), op
            if found is None:
                return None
            (element, operation), averaged = found, op is ReduceOp.AVG
        kind = Kind(self._comms, dtype, targets, sources, root, element, operation, self._near)
        # What the root takes another way for its length, the others do too, though each has but a part of it.
        parts = self._size if name in PARTED and kind.rank != root else 1
        way = WAYS[name](kind) if 0 < parts * kind.nbytes <= LONGEST else None
        if way is None:
            return None
        word = word_of(fingerprint_of(key, way.counts, way.sends, way.receives).compared()[1:])
        rows = self._agreement.rows_of(way.sends, way.receives) if way.sends else 0
        if len(self._recipes) >= _MOST:
            self._recipes.clear()
        said, level = self._agreement.say(word, rows), self._agreement.say(word, rows, level=True)
        divisor = self._size if averaged and root in (None, kind.rank) else 0
        recipe = self._recipes[key] = _Recipe(said, level, way, divisor, extreme)
        return recipe


def _call(recipe: _Recipe, target: Any, source: Any) -> Call:
    """What takes the longer way after all, as it passes the door: an all_to_all, or an extreme of floats."""
    way = recipe.way
    if recipe.extreme is not None:
        flat = (target.view(-1),)
        return Call(name="all_reduce", inputs=flat, outputs=flat, op=recipe.extreme)
    sides = [
        side.view(-1).split(counts) if isinstance(side, torch.Tensor) else [t.view(-1) for t in side]
        for side, counts in ((source, way.sends), (target, way.receives))
    ]
    return Call(name="all_to_all", inputs=tuple(sides[0]), outputs=tuple(sides[1]))
