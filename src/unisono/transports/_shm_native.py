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

__all__ = ["NativeCalls"]

_OK, _DIFFERS, _LATE, _LEFT, _ABORTED, _REFUSED = 0, 1, 2, 3, 4, 6
"""As in src/native/board.hpp."""

_ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"})
_LISTS = {
    "all_gather": (True, False),
    "all_to_all": (True, True),
    "gather": (True, False),
    "reduce_scatter": (False, True),
    "scatter": (False, True),
}
"""Whether what is written is a list, and whether what is read is one."""
_SINGLE = {
    name: NAME_CODES[name.removesuffix("_single")]
    for name in ("all_gather_single", "all_to_all_single", "reduce_scatter_single")
}
"""Calls with one tensor to write and one to read."""
_ALONE = {name: NAME_CODES[name] for name in ("all_reduce", "broadcast", "reduce")}
"""Calls with one tensor."""


class NativeCalls:
    """The calls of one group. Those that need more than the core does are refused, and take the general path.

    Args:
        module: The native core.
        board: The counters that the core shares with Python.
        words, stages: The addresses of these, and of two stages a rank.
        stage_bytes: The length of a stage.
        crowded: Whether there are more ranks than processors: then waiting gives way at once.
        differ: Called when ranks' marks differ; raises.
    """

    names = frozenset({"barrier", *_ALONE, *_SINGLE, *_LISTS})

    def __init__(
        self,
        module: Any,
        board: Board,
        words: int,
        stages: int,
        stage_bytes: int,
        crowded: bool,
        differ: Callable[[], object],
    ) -> None:
        known = [(str(dtype).removeprefix("torch."), dtype.itemsize) for dtype in DTYPES]
        self.core = module.Core(words, stages, stage_bytes, board.rank, board.size, crowded, known)
        self._board, self._size, self._differ = board, board.size, differ
        self._now: tuple[str, Any, Any, str, int | None] | None = None

    # -- calls as the user made them ----------------------------------------------------------------
    def call(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        """As `Quick.call`."""
        if name in _LISTS:
            return self._call_lists(name, target, source, op, root, deadline)
        code, dtype, where, written = NAME_CODES["barrier"], 0, 0, 0
        given: tuple[int, int] | None = (0, 0)
        operation = OP_CODES[ReduceOp.BOR] if name == "barrier" else _operation(name, op)
        if name != "barrier":
            if not is_plain(target):
                return False
            dtype, where, written = DTYPE_CODES[target.dtype], target.data_ptr(), target.numel()
            code = _ALONE.get(name) or _SINGLE[name]
            if name in _SINGLE:
                given = self._source(name, target, source)
        if operation is None or given is None:
            return False
        if root is None:
            root = -1
        elif type(root) is not int or not 0 <= root < self._size:
            return False
        self._now = (name, target, source, op, root)
        return self._ended(self.core.call(code, operation, dtype, root, where, written, *given, deadline))

    def _source(self, name: str, target: torch.Tensor, source: Any) -> tuple[int, int] | None:
        """The address and the length of what is read; None if the two tensors do not belong together."""
        if not is_plain(source) or source.dtype is not target.dtype:
            return None
        # Each rank's part of an all_to_all is some of the rows.
        rows = (source, target) if name == "all_to_all_single" else ()
        if any(not tensor.dim() or tensor.shape[0] % self._size for tensor in rows):
            return None
        return source.data_ptr(), source.numel()

    def _call_lists(self, name: str, target: Any, source: Any, op: str, root: int | None, deadline: float) -> bool:
        sides: list[Sequence[torch.Tensor]] = []
        dtype: torch.dtype | None = None
        for given, listed in zip((target, source), _LISTS[name], strict=True):
            tensors = (given,) if not listed else () if given is None and name in _ROOTED else given
            if type(tensors) not in (tuple, list):
                return False
            for tensor in tensors:
                if not is_plain(tensor) or tensor.dtype is not (dtype or tensor.dtype):
                    return False
                dtype = tensor.dtype
            sides.append(tensors)
        operation = _operation(name, op)
        if operation is None or dtype is None or not (root is None or (type(root) is int and 0 <= root < self._size)):
            return False
        self._now = (name, target, source, op, root)
        return self._ended(self._carried(NAME_CODES[name], operation, dtype, root, sides, True, deadline))

    def _ended(self, status: int) -> bool:
        """Whether the call was made."""
        if status and status != _REFUSED:
            self._fail(status)
        self._now = None
        return not status

    # -- calls of the general path -------------------------------------------------------------------
    def carry(self, call: Call, deadline: float) -> bool:
        """Make a call as it passes the door; False, with nothing done, if there is no kernel for it."""
        tensors = (*call.inputs, *call.outputs)
        operation = 0 if call.asked is None else OP_CODES[call.asked]
        sides = call.outputs, call.inputs
        dtype = tensors[0].dtype if tensors else None
        return self._ended(self._carried(NAME_CODES[call.name], operation, dtype, call.root, sides, False, deadline))

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
        self._ended(self.core.compare(first, second, list(counts), deadline))

    # -- failures ------------------------------------------------------------------------------------
    def abort(self) -> None:
        """End every wait, from any thread."""
        self.core.abort()

    def _fail(self, status: int) -> NoReturn:
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
        """Of the call that was refused or failed last as the user made it, if any; the same as of the general path."""
        if self._now is None:
            return None
        name, target, source, op, root = self._now
        self._now = None
        root = None if root == -1 else root
        if name == "barrier":
            return Fingerprint(0, name, ReduceOp.BOR.value, algorithm="native", site=call_site())
        written, read = _listed(target), _listed(source)
        numels = [t.numel() for t in written], [t.numel() for t in read]
        counts, sends, receives = _counts(name, *numels, self._board.size)
        example = (read if name.startswith(("all_gather", "all_to_all", "gather")) else written)[0]
        return Fingerprint(
            call=0,
            operation=name,
            op=parse_op(op).value if op else None,
            root=root,
            dtype=str(example.dtype).removeprefix("torch."),
            counts=counts,
            device="cpu",
            algorithm="native",
            sends=sends,
            receives=receives,
            shape=tuple(example.shape),
            site=call_site(),
        )


def _operation(name: str, op: str) -> int | None:
    """Its number, 0 where there is none to name; None for one that is not known by this very name."""
    if name not in _REDUCING:
        return 0
    return OP_CODES.get(op) if type(op) in (str, ReduceOp) else None


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
