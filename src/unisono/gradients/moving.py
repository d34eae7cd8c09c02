"""What an averager remembers from step to step, and how it follows to other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from unisono.communicator import Communicator
from unisono.gradients.plan import Named
from unisono.gradients.schedule import BucketSchedule

__all__ = ["Moving", "check_unhooked"]


class Moving(ABC):
    """Base of the averager: its state, and its moves."""

    _schedule: BucketSchedule
    _steps: list[int]

    def state_dict(self) -> dict[str, Any]:
        """What a codec remembers from step to step, and how many steps there were. Differs from rank to rank."""
        codecs = [self._schedule.reducer.codec_of(bucket) for bucket in self._schedule.buckets]
        return {"steps": self._steps[-1], "codecs": [None if codec is None else codec.state_dict() for codec in codecs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same rank, of an averager made alike."""
        buckets = self._schedule.buckets
        if len(state["codecs"]) != len(buckets):
            raise ValueError(
                f"the state is of {len(state['codecs'])} buckets, and this averager has {len(buckets)}: "
                "it was made of another model, or with other sizes"
            )
        self._steps[-1] = state["steps"]
        for bucket, saved in zip(buckets, state["codecs"], strict=True):
            codec = self._schedule.reducer.codec_of(bucket)
            if codec is not None and saved is not None:
                codec.load_state_dict(saved)

    def move_to(self, comm: Communicator) -> None:
        """Average over the ranks of another communicator from now on, such as what `comm.rebuild()` gave.

        Collective over it; newcomers make an averager of their own meanwhile. A step that was broken off is
        forgotten. Parameters are left as they are: give all ranks the same ones (`un.recovery` does).

        What a codec remembers stays behind, for it may be of a step that others never made.
        """
        self.remove()
        self._attach(comm, sync_parameters=False)

    @abstractmethod
    def remove(self) -> None:
        """Take the hooks off."""

    @abstractmethod
    def _attach(self, comm: Communicator, *, sync_parameters: bool) -> None: ...


def check_unhooked(named: Named) -> None:
    """`ValueError` for a tensor that takes no hooks, or has an averager's: two would take each other's gradients."""
    for name, parameter in named:
        if not parameter.is_leaf:
            raise ValueError(f"{name!r} is the result of a computation; pass what it was computed from")
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            if isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), Moving):
                raise ValueError(f"{name!r} is averaged by another GradientAverager; remove() that one first")
