"""What every call does first: is it this thread's communicator, is it open, are the arguments right."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from threading import get_ident
from typing import Literal, Required, TypedDict

import torch

from unisono.engine import Engine
from unisono.errors import CommError
from unisono.guarded import Guarded
from unisono.site import call_site
from unisono.standing import ANYONE
from unisono.tensors import Staging, check_apart, check_tensor

__all__ = ["Async", "Blocking", "Caller", "others"]


class Blocking(TypedDict, total=False):
    """Keywords of a collective that returns when it is done."""

    algorithm: str | None
    async_op: Literal[False]
    timeout: float | None


class Async(TypedDict, total=False):
    """Keywords of a collective that returns a `Work` at once."""

    algorithm: str | None
    async_op: Required[Literal[True]]
    timeout: float | None


class Caller:
    """Base of the parts that `Communicator` is made of."""

    _engine: Engine
    _check: str

    @property
    def rank(self) -> int:
        """This rank, from 0 to `size` - 1."""
        return self._engine.group.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._engine.group.size

    def exception(self) -> CommError | None:
        """The first cause of failure; None while calls can be made."""
        try:
            self._engine.check("exception")
        except CommError as error:
            return error
        return None

    def _enter(self, operation: str) -> None:
        """Raise unless this thread may call, and the communicator still works."""
        self._own(operation)
        self._engine.check(operation)

    def _own(self, operation: str) -> None:
        """Raise unless this thread may call."""
        here, engine = get_ident(), self._engine
        if engine.owner is None:
            engine.owner = engine.activity.owner = here
        if engine.owner not in (here, ANYONE):
            error = CommError(
                f"this communicator belongs to another thread than {threading.current_thread().name!r}; "
                "call hand_over() there first, or use dup() for a second communicator"
            )
            raise engine.located(error, operation)

    def _staging(self) -> Staging:
        away = self._engine.transport.staged
        if self._check != "full":
            return Staging(away)
        return Guarded(away, f"the call at {call_site()}")

    def _check_rank(self, rank: int, name: str, *, other: bool = False) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"{name} must be an int, not {type(rank).__name__}")
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank} is no rank of this communicator, whose ranks are 0 to {self.size - 1}")
        if other and rank == self.rank:
            raise ValueError(f"{name}={rank} is this rank itself; copy the tensor instead")

    def _check_tensor(self, tensor: torch.Tensor, name: str, *, written: bool = False) -> None:
        check_tensor(tensor, name, self._engine.transport.devices, written=written)

    def _check_list(
        self, tensors: Sequence[torch.Tensor], name: str, like: torch.Tensor, *, written: bool = False
    ) -> None:
        """One tensor a rank, all of `like`'s dtype and device."""
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
        if len(tensors) != self.size:
            raise ValueError(f"{name} must have one tensor for each of the {self.size} ranks, not {len(tensors)}")
        for index, tensor in enumerate(tensors):
            self._check_tensor(tensor, f"{name}[{index}]", written=written)
            self._check_like(tensor, f"{name}[{index}]", like)

    def _check_like(self, tensor: torch.Tensor, name: str, like: torch.Tensor) -> None:
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, but the other tensor of the call is {like.dtype} "
                f"on {like.device}; they must be alike"
            )

    def _check_targets(self, targets: Sequence[torch.Tensor], name: str, source: torch.Tensor) -> None:
        """Results lie apart from each other, and from the source but in this rank's own place."""
        check_apart([(f"{name}[{r}]", t) for r, t in enumerate(targets)])
        check_apart(others(targets, name, self.rank, source), [("the input", source)])


def others(tensors: Sequence[torch.Tensor], name: str, rank: int, own: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """All of a list but a rank's own entry where `own` is in place there, each with what it is called in messages."""
    return [(f"{name}[{r}]", t) for r, t in enumerate(tensors) if r != rank or t.data_ptr() != own.data_ptr()]
