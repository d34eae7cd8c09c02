"""What an averager remembers from step to step, and how it follows to other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from unisono.communicator import Communicator
from unisono.gradients.hooks import is_averagers
from unisono.gradients.plan import Named
from unisono.gradients.schedule import BucketSchedule

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["Moving", "check_unhooked"]


class Moving(ABC):
    """Base of the averager: its state, and its moves."""

    _schedule: BucketSchedule
    _names: list[str]
    _steps: list[int]

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each message, in the order of messages."""
        return [[self._names[i] for i in bucket.indices] for bucket in self._schedule.buckets]

    def state_dict(self) -> dict[str, Any]:
        """What codecs remember from step to step, and how many steps there were. Differs from rank to rank."""
        codecs = self._codecs()
        states = [codec.state_dict() for _, codec in codecs]
        return {"steps": self._steps[-1], "buckets": [names for names, _ in codecs], "codecs": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same rank, of an averager made alike.

        Raises:
            ValueError: It is of another model, or of buckets of other sizes, and a codec remembers something of them.
        """
        codecs = self._codecs()
        names, saved = [names for names, _ in codecs], state["buckets"]
        if saved != names:
            first = next((pair for pair in zip(saved, names, strict=False) if pair[0] != pair[1]), None)
            ends = [f"{part[0]!r} to {part[-1]!r}" for part in first or ()]
            where = f"; one is {ends[0]} there, and {ends[1]} here" if ends else ""
            raise ValueError(
                f"the state is of {len(saved)} buckets with codecs, and this averager has {len(names)}{where}: it was "
                "made of another model, with other sizes, or with no codec or another one"
            )
        for (_, codec), one in zip(codecs, state["codecs"], strict=True):
            codec.load_state_dict(one)
        self._steps[-1] = state["steps"]

    def _codecs(self) -> list[tuple[list[str], Codec]]:
        """Those that remember something, with the names of their parameters."""
        made = [self._schedule.reducer.codec_of(bucket) for bucket in self._schedule.buckets]
        return [(names, codec) for names, codec in zip(self.buckets, made, strict=True) if codec is not None]

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
            if is_averagers(hook):
                raise ValueError(f"{name!r} is averaged by another GradientAverager; remove() that one first")
