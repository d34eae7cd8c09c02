"""Collectives of Python values: without pickle, unless the caller trusts its peers."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from unisono import serialization
from unisono.comm.exchanges import ExchangeMixin
from unisono.comm.probe import ProbeMixin
from unisono.comm.reductions import ReductionMixin
from unisono.comm.rooted import RootedMixin
from unisono.comm.uneven import UnevenMixin
from unisono.core.failure import text_of
from unisono.core.tensors import view_of
from unisono.serialization.functions import dumps

__all__ = ["ObjectMixin"]

_PLAIN, _PICKLED, _REFUSED, _WRONG = b"\0", b"\1", b"\2", b"\3"
_REASONS: dict[bytes, type[Exception]] = {_REFUSED: TypeError, _WRONG: ValueError}
"""Exceptions to raise where an error arrives instead of a value."""


class ObjectMixin(ProbeMixin, RootedMixin, ExchangeMixin, UnevenMixin, ReductionMixin):
    """Collective: every rank of the group calls each of these, in the same order.

    Values are None, bool, numbers, strings, bytes, containers, dataclasses, enums and tensors (see
    `unisono.serialization`). With `trusted=True` on every rank, anything that cloudpickle supports: then a peer
    can run code here, so set it only where all ranks run your own program.

    A value that cannot be sent raises `TypeError`, on its own rank and on all its receivers. The communicator
    stays usable.

    Cost: one small collective for the sizes, one for the bytes.
    """

    def broadcast_object(self, obj: Any = None, src: int = 0, *, trusted: bool = False) -> Any:
        """Return rank `src`'s value on every rank. Collective.

        Args:
            obj: The value on rank `src`: None, bool, number, string, bytes, container, dataclass, enum or tensor.
            src: The rank that sends.
            trusted: Send anything that cloudpickle supports, which lets peers run code here. The same on all ranks.

        Raises:
            TypeError: The value cannot be sent; raised on all ranks.
            ValueError: A rank sent a pickled value, and this rank did not pass `trusted=True`.

        Example:
            >>> un.launch(lambda comm: comm.broadcast_object({"lr": 0.1 + comm.rank}), nprocs=2, backend="thread")
            [{'lr': 0.1}, {'lr': 0.1}]
        """
        self._engine.enter("broadcast_object")
        self._check_rank(src, "src")
        data = self._encode(obj, trusted) if self.rank == src else b""
        length = self._numbers([len(data)])
        self.broadcast(length, src)
        buffer = self._bytes(data) if self.rank == src else self._blank(int(length.item()))
        self.broadcast(buffer, src)
        _check(data)
        return obj if self.rank == src else _decode(buffer, trusted)

    def all_gather_object(self, obj: Any, *, trusted: bool = False) -> list[Any]:
        """Return every rank's value, in order of rank, on every rank. Collective.

        Args:
            obj: This rank's value, as for `broadcast_object`.
            trusted: As for `broadcast_object`.

        Raises:
            TypeError, ValueError: As `broadcast_object`.

        Example:
            >>> un.launch(lambda comm: comm.all_gather_object(comm.rank * "x"), nprocs=3, backend="thread")[0]
            ['', 'x', 'xx']
        """
        self._engine.enter("all_gather_object")
        buffer = self._bytes(self._encode(obj, trusted))
        lengths = self._numbers([0] * self.size)
        self.all_gather_single(lengths, self._numbers([buffer.numel()]))
        buffers = [self._blank(n) for n in lengths.tolist()]
        self.all_gather(buffers, buffer)
        return [_decode(b, trusted) for b in buffers]

    def gather_object(self, obj: Any, dst: int = 0, *, trusted: bool = False) -> list[Any] | None:
        """Return every rank's value, in order of rank, on rank `dst`; None on the other ranks. Collective.

        Args:
            obj: This rank's value, as for `broadcast_object`.
            dst: The rank that receives.
            trusted: As for `broadcast_object`.

        Raises:
            TypeError, ValueError: As `broadcast_object`, on rank `dst` and on the rank of the value.

        Example:
            >>> un.launch(lambda comm: comm.gather_object({"rank": comm.rank}, dst=1), nprocs=2, backend="thread")
            [None, [{'rank': 0}, {'rank': 1}]]
        """
        self._engine.enter("gather_object")
        self._check_rank(dst, "dst")
        data = self._encode(obj, trusted)
        buffer, here = self._bytes(data), self.rank == dst
        lengths = [self._blank(8).view(torch.int64) for _ in range(self.size)] if here else None
        self.gather(self._numbers([buffer.numel()]), lengths, dst)
        counts = [int(n.item()) for n in lengths] if lengths is not None else [0] * self.size
        collected = self._blank(sum(counts))
        self.all_to_all_single(collected, buffer, counts, [buffer.numel() if r == dst else 0 for r in range(self.size)])
        _check(data)
        return [_decode(part, trusted) for part in collected.split(counts)] if here else None

    def scatter_object(self, objs: Sequence[Any] | None = None, src: int = 0, *, trusted: bool = False) -> Any:
        """Return entry r of rank `src`'s list on rank r; the other ranks pass no list. Collective.

        Args:
            objs: On rank `src`, one value a rank, as for `broadcast_object`; else None.
            src: The rank that sends.
            trusted: As for `broadcast_object`.

        Raises:
            TypeError: A value cannot be sent; raised on all ranks.
            ValueError: The list does not have one value for each rank; raised on all ranks.

        Example:
            >>> def program(comm):
            ...     return comm.scatter_object(["first", "second"] if comm.rank == 0 else None)
            >>> un.launch(program, nprocs=2, backend="thread")
            ['first', 'second']
        """
        self._engine.enter("scatter_object")
        self._check_rank(src, "src")
        parts = self._entries(objs, trusted) if self.rank == src else []
        length = self._numbers([0])
        self.scatter(length, [self._numbers([len(p)]) for p in parts] or None, src)
        received = self._blank(int(length.item()))
        given = [len(p) for p in parts] or [0] * self.size
        taken = [received.numel() if r == src else 0 for r in range(self.size)]
        self.all_to_all_single(received, self._bytes(b"".join(parts)), taken, given)
        return _decode(received, trusted)

    def _entries(self, objs: Sequence[Any] | None, trusted: bool) -> list[bytes]:
        """Return the bytes for each rank; if any value cannot be sent, the reason for all ranks."""
        try:
            values = [] if objs is None else list(objs)
        except TypeError:
            # An object that is not a list has no value for any rank.
            values = []
        parts = [self._encode(value, trusted) for value in values]
        if len(parts) != self.size:
            wrong = f"objs on rank {self.rank} must have one value for each of the {self.size} ranks, not {len(parts)}"
            return [_WRONG + wrong.encode()] * self.size
        return [next((p for p in parts if p[:1] == _REFUSED), part) for part in parts]

    @property
    def device(self) -> torch.device:
        """Default device of this communicator's tensors."""
        return torch.device(self._engine.options.device)

    def _encode(self, obj: Any, trusted: bool) -> bytes:
        """Return a value's bytes; if it cannot be sent, those of the reason, so that receivers get an error."""
        try:
            return _PICKLED + dumps(obj) if trusted else _PLAIN + serialization.encode(obj)
        except Exception as error:
            reason = f"rank {self.rank} has a value that cannot be sent: {text_of(error)}"
            return _REFUSED + reason.encode(errors="replace")

    def _numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _bytes(self, data: bytes) -> torch.Tensor:
        if not data:
            return self._blank(0)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def _blank(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self.device)


def _check(data: bytes) -> None:
    if data[:1] in _REASONS:
        raise _REASONS[data[:1]](data[1:].decode(errors="replace"))


def _decode(buffer: torch.Tensor, trusted: bool) -> Any:
    here = buffer.cpu()
    data = bytes(view_of(here)) if here.numel() else b""
    if data[:1] == _PLAIN:
        return serialization.decode(data[1:])
    _check(data)
    if data[:1] != _PICKLED or not trusted:
        raise ValueError("a rank sent a pickled value; pass trusted=True on every rank if you trust them all")
    return pickle.loads(data[1:])
