"""Gradients of some parameters in one run of memory, and words on each: whether this rank has it, or lacks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from unisono.gradients.filling import Filling
from unisono.gradients.naming import About
from unisono.gradients.plan import dense_strides
from unisono.types import Work

__all__ = ["Bucket"]

_ASKS = 2
"""Words by which a rank asks all ranks to talk about what came late, and about what is frozen no more."""
_CHUNK_BYTES = 512 << 10
"""When so much has come it is taken: it is still in the cache, and a call for each would take longer than copying."""
_PAST_BYTES = 1 << 20
"""From here on a bucket is written past the caches: it will not stay in them, and other ranks' cores hold its lines."""


class Bucket(Filling):
    """One message. A gradient that has come is copied in; after the reduction `p.grad` is a view of the bucket.

    Args:
        indices: Which of the model's parameters these are.
        parameters: Those, of one dtype and device.
        allocate: Makes one-dimensional memory of so many elements of a dtype.
        scale: What each contribution is multiplied by on its way in.
        name: Of its parameters, for errors.

    Attributes:
        memory: All that travels: the gradients, two words on each, and some on what is asked.
        flat: The gradients.
        found: What `present` said, once it was asked.
        complete: What it says where every rank had all.
        asked: After that: whether any rank asks all of them to talk, about either of two things.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.Tensor],
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
        scale: float = 1.0,
        name: str = "",
    ) -> None:
        self.name, self.about = name, About(f"averaging the gradients of {name}")
        self.indices, self.parameters = tuple(indices), list(parameters)
        self.scale = scale
        numels = [p.numel() for p in parameters]
        like = parameters[0]
        self.memory = allocate(sum(numels) + 2 * len(numels) + _ASKS, like.dtype, like.device)
        self.flat = self.memory[: sum(numels)]
        self._words = self.memory[sum(numels) :]
        came = [scale] * len(numels) + [0] * (len(numels) + _ASKS)
        self._all_came = torch.tensor(came, dtype=like.dtype, device=like.device)
        self.views = [_shaped(part, p) for part, p in zip(self.flat.split(numels), parameters, strict=True)]
        self.complete = [(True, False)] * len(numels)
        self._edges = [0, *accumulate(numels)]
        self.shapes = [p.shape for p in parameters]
        self.work: Work | None = None
        self._factor = 1.0
        plain, past = scale == 1.0 and like.is_cpu and like.is_floating_point(), self.memory.nbytes >= _PAST_BYTES
        self._within = self.flat.data_ptr(), self.flat.data_ptr() + self.flat.nbytes
        super().__init__(tuple(parameters), tuple(self.views), _CHUNK_BYTES, plain, past, self._within)
        self.begin()

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self.forget()
        self._graphs: dict[int, torch.Tensor] = {}
        self._backup: torch.Tensor | None = None
        self.found: list[tuple[bool, bool]] | None = None
        self.asked = (False,) * _ASKS

    def take_by_torch(self, slots: list[int]) -> None:
        """Copy gradients in that are not inside yet, in one go."""
        views, grads, taken = [], [], []
        for slot in slots:
            parameter = self.parameters[slot]
            # A later hook may have taken it away.
            if parameter.grad is None:
                continue
            views.append(self.views[slot])
            grads.append(self._plain(slot, parameter.grad))
            taken.append(slot)
            self.inside[slot] = True
            # What comes now comes alone, and is added.
            parameter.grad = None
        if len(views) == 1 and self.scale != 1.0:
            torch.mul(grads[0], self.scale, out=views[0])
        elif views:
            torch._foreach_copy_(views, grads)
            if self.scale != 1.0:
                torch._foreach_mul_(self._run(taken) or views, self.scale)

    def _run(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """The memory of gradients that lie side by side as one tensor, for which one call is enough."""
        first, last = min(slots), max(slots)
        if last - first + 1 > len(slots):
            return []
        return [self.flat[self._edges[first] : self._edges[last + 1]]]

    def holds(self, grad: torch.Tensor) -> bool:
        """Whether a gradient lies in this bucket's memory."""
        low, high = self._within
        return grad.layout == torch.strided and grad.numel() > 0 and low <= grad.data_ptr() < high

    def is_place(self, slot: int, grad: torch.Tensor) -> bool:
        """Whether a gradient lies where its mean goes."""
        return _same(grad, self.views[slot])

    def add(self, slot: int) -> None:
        """More has come of a gradient that is inside."""
        parameter = self.parameters[slot]
        if parameter.grad is None:
            # Another pass, which a hook of the user's ran before this one's, has brought it along.
            return
        self.views[slot].add_(self._plain(slot, parameter.grad), alpha=self.scale)
        parameter.grad = None

    def _plain(self, slot: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient as numbers only."""
        if grad.requires_grad:
            self._graphs[slot], grad = grad, grad.detach()
        if grad.layout == torch.strided:
            if self.holds(grad) and not self.is_place(slot, grad):
                raise RuntimeError(
                    f"the gradient of parameter number {self.indices[slot]} lies where those of others are averaged: "
                    "it has been taken from another parameter, or turned. Give it a clone() in its place"
                )
            return grad
        dense: torch.Tensor = grad.to_dense()
        return dense

    def fill(self, factor: float, here: bool = True, asks: Sequence[bool] = (), backup: bool = False) -> None:
        """Multiply what was taken, and zeros for what has not come, by this rank's weight; and say what has come.

        Args:
            factor: This rank's weight.
            here: Whether this rank has data: one that is through neither has a gradient nor lacks it.
            asks: What this rank asks all ranks to talk about.
            backup: Whether to keep a copy, for `rewind`.
        """
        self._backup = self.memory.clone() if backup else None
        self.started, self._factor = True, factor
        if not factor:
            # What counts for nothing may be NaN, as a mean over no samples is.
            self.flat.zero_()
        elif factor != 1.0:
            self.flat.mul_(factor)
        if self.missing:
            lacks = [here and not came for came in self.came]
            said = torch.tensor([*self.came, *lacks], dtype=self._words.dtype).mul_(self.scale)
            self._words[: len(said)].copy_(said)
            self._words[len(said) :] = 0
        else:
            self._words.copy_(self._all_came)
        for index, ask in enumerate(asks):
            if ask:
                self._words[index - _ASKS] = self.scale

    def can_rewind(self) -> bool:
        """Whether this rank's part of the reduction can be given again."""
        return self._backup is not None or not self.started

    def rewind(self) -> None:
        """Undo `fill`, and a reduction that came to nothing."""
        if self._backup is not None:
            self.memory.copy_(self._backup)
            self.started = self.late = False
            self.found = self._backup = None

    def take_rest(self, earlier: dict[int, torch.Tensor]) -> None:
        """Take all that has not been taken, zeros for what has not come, and what p.grad held before the pass.

        Args:
            earlier: The latter, by index; what is taken is removed from it.
        """
        rest, more = [], []
        for slot, (parameter, view, inside) in enumerate(zip(self.parameters, self.views, self.inside, strict=True)):
            held = earlier.pop(self.indices[slot], None)
            if held is not None and parameter.grad is None and not inside:
                parameter.grad = held
            elif held is not None:
                more.append((slot, held))
            if parameter.grad is None or not parameter.requires_grad:
                if not inside:
                    view.zero_()
            elif inside:
                self.add(slot)
            else:
                rest.append(slot)
        self.take(rest)
        for slot, held in more:
            self.views[slot].add_(held.detach().to_dense(), alpha=self.scale)

    def present(self) -> list[tuple[bool, bool]]:
        """After the reduction, for each gradient: whether any rank had it, and whether any lacked it.

        Both are told by what is 0, for no count of many ranks is exact in 16 bits.
        """
        words: list[float | complex] = self._words.tolist()
        count = len(self.parameters)
        late, thawed = words[-_ASKS:]
        self.asked = late != 0, thawed != 0
        if all(words[:count]) and not any(words[count : 2 * count]):
            return self.complete
        return [(had != 0, lacked != 0) for had, lacked in zip(words[:count], words[count : 2 * count], strict=True)]

    def words(self) -> torch.Tensor:
        """What travels beside the gradients where those travel in another form."""
        return self._words

    def hand_out(self, present: Sequence[tuple[bool, bool]]) -> None:
        """Put the means where optimizers look; a gradient that no rank had stays what it was."""
        for parameter, view, inside, (had, _) in zip(self.parameters, self.views, self.inside, present, strict=True):
            if had or inside:
                parameter.grad = view
        for slot, graph in self._graphs.items():
            # The values are the bucket's; what the gradient was made of stays this rank's.
            graph.detach().copy_(self.views[slot])
            self.parameters[slot].grad = graph

    def add_late(self) -> None:
        """Add to the means what came after them, so that another reduction takes it in."""
        factor = self._factor
        for slot, (view, parameter) in enumerate(zip(self.views, self.parameters, strict=True)):
            grad = parameter.grad
            if grad is not None and (grad.layout != torch.strided or grad.data_ptr() != view.data_ptr()):
                if factor:
                    view.add_(self._plain(slot, grad), alpha=factor)
                parameter.grad = None
        self.memory.mul_(self.scale)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.data_ptr() == other.data_ptr() and all(a == b for n, a, b in strides if n > 1)


def _shaped(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view with the parameter's shape, and its order of memory where that has no gaps."""
    strides = dense_strides(like)
    return part.view(like.shape) if strides is None else part.as_strided(like.shape, strides)
