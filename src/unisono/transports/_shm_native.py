"""Collectives of shared memory by the native core: one call for each, whatever its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from unisono.control.failure import LEFT
from unisono.errors import PeerLostError
from unisono.fingerprint import Fingerprint
from unisono.reduction import parse_op
from unisono.site import call_site
from unisono.tensors import is_plain
from unisono.transports._shm_board import Board, late
from unisono.transports._shm_marks import DTYPE_CODES, DTYPES, NAME_CODES, OP_CODES
from unisono.types import Call, ReduceOp

__all__ = ["OK", "REFUSED", "NativeCalls"]

OK, _DIFFERS, _LATE, _LEFT, _ABORTED, REFUSED = 0, 1, 2, 3, 4, 6
"""As in src/native/board.hpp."""

_BARRIER, _ALL_TO_ALL = NAME_CODES["barrier"], NAME_CODES["all_to_all"]
_OF_BARRIER = OP_CODES["bor"]
_ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
_SINGLE = {
    "all_gather_single": (False, True, False),
    "all_reduce": (True, False, False),
    "all_to_all_single": (False, True, False),
    "broadcast": (False, False, True),
    "reduce": (True, False, True),
    "reduce_scatter_single": (True, True, False),
}
"""Calls with one tensor to write: whether they reduce, read another one, and have a root."""
_LISTS = {
    "all_gather": (False, True, False),
    "all_to_all": (False, True, True),
    "gather": (False, True, False),
    "reduce_scatter": (True, False, True),
    "scatter": (False, False, True),
}
"""Calls with lists: whether they reduce, write a list, and read one."""
_CODES = {name: NAME_CODES[name.removesuffix("_single")] for name in (*_SINGLE, *_LISTS)}


class NativeCalls:
    """The calls of one group. Those that need more than the core does are refused, and take the general path.

    Args:
        module: The native core.
        board: The counters that the core shares with Python.
        words, stages, rings: The addresses of these, of two stages a rank, and of the rings for messages.
        stage_bytes: The length of a stage.
        crowded: Whether there are more ranks than processors: then waiting gives way at once.
        differ: Called when ranks' marks differ; raises.
    """

    def __init__(
        self,
        module: Any,
        board: Board,
        words: int,
        stages: int,
        rings: int,
        stage_bytes: int,
        crowded: bool,
        differ: Callable[[], object],
    ) -> None:
        known = [(str(dtype).removeprefix("torch."), dtype.itemsize) for dtype in DTYPES]
        self.core = module.Core(words, stages, rings, stage_bytes, board.rank, board.size, crowded, known)
        self._board, self._size, self._differ = board, board.size, differ
        self._now: tuple[Any, ...] = ()

    # -- calls as the user made them ----------------------------------------------------------------
    def call(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        """As `Quick.call`."""
        form = _SINGLE.get(name)
        if form is None:
            if name != "barrier":
                return self._call_lists(name, target, source, op, root, deadline)
            status = self.core.call(_BARRIER, _OF_BARRIER, 0, -1, 0, 0, 0, 0, deadline)
            return status == OK or self._ended(status, name)
        reduces, reads, rooted = form
        code, operation, where, read = _CODES[name], 0, 0, 0
        if not is_plain(target):
            return False
        if reads:
            if not self._fits(name, target, source):
                return False
            where, read = source.data_ptr(), source.numel()
        try:
            dtype, operation = DTYPE_CODES[target.dtype], OP_CODES[op] if reduces else 0
        except (KeyError, TypeError):
            return False
        if not rooted:
            root = -1
        elif type(root) is not int or not 0 <= root < self._size:
            return False
        status = self.core.call(code, operation, dtype, root, target.data_ptr(), target.numel(), where, read, deadline)
        return status == OK or self._ended(status, name, target, source, op, root)

    def _fits(self, name: str, target: torch.Tensor, source: Any) -> bool:
        """Whether what is read goes with what is written; the core looks at their lengths."""
        if not is_plain(source) or source.dtype is not target.dtype:
            return False
        if name != "all_to_all_single":
            return True
        # Each rank's part is some of the rows.
        rows = source.shape[:1] + target.shape[:1]
        return len(rows) == 2 and not rows[0] % self._size and not rows[1] % self._size

    def _call_lists(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        reduces, *listed = _LISTS[name]
        rooted = name in _ROOTED
        sides: list[Sequence[torch.Tensor]] = []
        dtype: torch.dtype | None = None
        for given, is_list in zip((target, source), listed, strict=True):
            tensors = (given,) if not is_list else () if given is None and rooted else given
            if type(tensors) not in (tuple, list):
                return False
            for tensor in tensors:
                if not is_plain(tensor) or tensor.dtype is not (dtype or tensor.dtype):
                    return False
                dtype = tensor.dtype
            sides.append(tensors)
        operation = OP_CODES.get(op) if reduces and type(op) in (str, ReduceOp) else 0
        if dtype is None or operation is None or (rooted and not (type(root) is int and 0 <= root < self._size)):
            return False
        status = self._carried(_CODES[name], operation, dtype, root, sides, True, deadline)
        return status == OK or self._ended(status, name, target, source, op, root)

    def _ended(self, status: int, *call: Any) -> bool:
        """False for a call that was refused; raises what it has failed by."""
        if status != REFUSED:
            self._now = call
            try:
                self.fail(status)
            finally:
                self._now = ()
        return False

    # -- calls of the general path -------------------------------------------------------------------
    def carry(self, call: Call, deadline: float) -> bool:
        """Make a call as it passes the door; False, with nothing done, if there is no kernel for it."""
        tensors = (*call.inputs, *call.outputs)
        operation = 0 if call.asked is None else OP_CODES[call.asked]
        sides = call.outputs, call.inputs
        dtype = tensors[0].dtype if tensors else None
        status = self._carried(NAME_CODES[call.name], operation, dtype, call.root, sides, False, deadline)
        if status not in (OK, REFUSED):
            self.fail(status)
        return status == OK

    def _carried(
        self,
        name: int,
        operation: int,
        dtype: torch.dtype | None,
        root: int | None,
        sides: Sequence[Sequence[torch.Tensor]],
        divides: bool,
        deadline: float,
    ) -> int:
        written, read = sides
        status: int = self.core.call_lists(
            name,
            operation,
            0 if dtype is None else DTYPE_CODES[dtype],
            -1 if root is None else root,
            [tensor.data_ptr() for tensor in written],
            [tensor.numel() for tensor in written],
            [tensor.data_ptr() for tensor in read],
            [tensor.numel() for tensor in read],
            divides,
            deadline,
        )
        return status

    def compare(self, first: int, second: int, counts: Sequence[int], deadline: float) -> None:
        """Compare a mark in a round of its own, and, if there are any, what ranks give each other."""
        status = self.core.compare(first, second, list(counts), deadline)
        if status != OK:
            self.fail(status)

    # -- failures ------------------------------------------------------------------------------------
    def abort(self) -> None:
        """End every wait, from any thread."""
        self.core.abort()

    def fail(self, status: int) -> NoReturn:
        """Raise what a call of the core has failed by."""
        missing = self.core.missing
        if status == _DIFFERS:
            self._differ()
        elif status == _LATE:
            raise late(self.core.waited_s, [missing])
        elif status == _LEFT:
            raise PeerLostError(f"rank {missing} {LEFT}", peer=missing)
        elif status == _ABORTED and self._board.broken is not None:
            raise self._board.broken
        raise RuntimeError(f"the native core ended a call with status {status}")

    def fingerprint(self) -> Fingerprint | None:
        """Of the call that has just failed, if it was made as the user made it: that of the general path."""
        if not self._now:
            return None
        name, *given = self._now
        if not given:
            return Fingerprint(0, name, ReduceOp.BOR.value, algorithm="native", site=call_site())
        target, source, op, root = given
        written, read = _listed(target), _listed(source)
        numels = [t.numel() for t in written], [t.numel() for t in read]
        counts, sends, receives = _counts(name, *numels, self._board.size)
        example = (read if name.startswith(("all_gather", "all_to_all", "gather")) else written)[0]
        return Fingerprint(
            call=0,
            operation=name,
            op=parse_op(op).value if op else None,
            root=None if root == -1 else root,
            dtype=str(example.dtype).removeprefix("torch."),
            counts=counts,
            device="cpu",
            algorithm="native",
            sends=sends,
            receives=receives,
            shape=tuple(example.shape),
            site=call_site(),
        )


def _listed(given: Any) -> Sequence[torch.Tensor]:
    return () if given is None else (given,) if isinstance(given, torch.Tensor) else given


_Counts = tuple[int, ...]


def _counts(name: str, written: list[int], read: list[int], size: int) -> tuple[_Counts, _Counts, _Counts]:
    """Elements that ranks agree on, and those to and from each rank where they agree by pairs."""
    if name == "all_to_all_single":
        return (), (read[0] // size,) * size, (written[0] // size,) * size
    if name == "all_to_all":
        return (), tuple(read), tuple(written)
    if name == "all_gather_single":
        return (read[0],) * size, (), ()
    if name == "reduce_scatter_single":
        return (written[0],) * size, (), ()
    return tuple(read if name in ("gather", "reduce_scatter") else written), (), ()
