"""Checks common to all calls: the owning thread, an open communicator, valid arguments."""

from __future__ import annotations

from typing import Literal, Required, TypedDict

import torch

from unisono.collectives.arguments import check_rank
from unisono.comm.engine import Engine
from unisono.core.buffers import Buffer
from unisono.core.tensors import check_tensor
from unisono.core.types import Timeout
from unisono.errors import CommError

__all__ = ["Async", "Blocking", "CommunicatorBase"]


class Blocking(TypedDict, total=False):
    """Keywords of a collective that returns when it is done."""

    algorithm: str | None
    async_op: Literal[False]
    timeout: Timeout | None


class Async(TypedDict, total=False):
    """Keywords of a collective that returns a `Work` immediately."""

    algorithm: str | None
    async_op: Required[Literal[True]]
    timeout: Timeout | None


class CommunicatorBase:
    """Base of the parts that `Communicator` is made of."""

    _engine: Engine
    _check: str
    _compared: dict[str, int]

    @property
    def rank(self) -> int:
        """This rank, from 0 to `size` - 1."""
        return self._engine.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._engine.group.size

    def exception(self) -> CommError | None:
        """Return the first cause of failure, without raising it; None while calls can be made."""
        try:
            self._engine.check(None)
        except CommError as error:
            return error
        return None

    def _require_same(self, what: str, value: bytes, wrong: Exception) -> None:
        """Raise an error, and break the communicator by it, if a rank that was here before had another value.

        No rank waits for another: of two that differ, the second fails.

        Args:
            what: Description of the value. Equal descriptions are compared in the order of calls.
            value: Any bytes.
            wrong: The error.
        """
        engine = self._engine
        if engine.closed or self.size == 1:
            return
        number = self._compared[what] = self._compared.get(what, 0) + 1
        key = f"{engine.group.name}/{what}/{number}"
        first = engine.control.compare_set(key, b"", value)
        if engine.control.add(f"{key}/ranks", 1) == self.size:
            engine.control.delete(key)
            engine.control.delete(f"{key}/ranks")
        if first != value:
            raise engine.report_failure(wrong, "a comparison of samples")

    def _check_rank(self, rank: int, name: str) -> None:
        check_rank(rank, name, self.size)

    def _check_tensor(self, buffer: Buffer, name: str, *, written: bool = False) -> torch.Tensor:
        return check_tensor(buffer, name, self._engine.transport.devices, written=written)
