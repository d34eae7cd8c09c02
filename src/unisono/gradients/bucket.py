"""Gradients of some parameters in one run of memory, and two words on each: whether this rank has it, or lacks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.gradients.plan import dense_strides
from unisono.types import Work

__all__ = ["Bucket"]

_HOT_BYTES = 128 << 10
"""A gradient of at least this length is taken at once, while it is in the cache; shorter ones together."""


class Bucket:
    """One message. A gradient that has come is copied in; after the reduction `p.grad` is a view of the bucket.

    Args:
        indices: Which of the model's parameters these are.
        parameters: Those, of one dtype and device.
        allocate: Makes one-dimensional memory of so many elements of a dtype.
        scale: What each contribution is multiplied by on its way in.

    Attributes:
        memory: All that travels: the gradients and the words.
        flat: The gradients.
        missing: How many have not come yet.
        started: Whether it is being reduced, or has been.
        late: Whether a gradient came again after that.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[torch.Tensor],
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
        scale: float = 1.0,
    ) -> None:
        self.indices, self.parameters = tuple(indices), list(parameters)
        self.scale = scale
        numels = [p.numel() for p in parameters]
        like = parameters[0]
        self.memory = allocate(sum(numels) + 2 * len(numels), like.dtype, like.device)
        self.flat = self.memory[: sum(numels)]
        self._words = self.memory[sum(numels) :]
        self.views = [_shaped(part, p) for part, p in zip(self.flat.split(numels), parameters, strict=True)]
        self._hot = [p.nbytes >= _HOT_BYTES for p in parameters]
        self.shapes = [p.shape for p in parameters]
        self.work: Work | None = None
        self._factor = 1.0
        self.begin()

    def begin(self) -> None:
        """Forget the last step's gradients."""
        count = len(self.parameters)
        self.came, self._inside = [False] * count, [False] * count
        self._graphs: dict[int, torch.Tensor] = {}
        self.missing = count
        self.started = self.late = False

    def arrived(self, slot: int) -> bool:
        """A gradient has come to `p.grad`: the first time, or again with more of it; whether the bucket is full now."""
        if self.started:
            self.late = True
            return False
        if self._hot[slot] or self._inside[slot]:
            self._take(slot)
        if not self.came[slot]:
            self.came[slot] = True
            self.missing -= 1
        return not self.missing

    def _take(self, slot: int) -> None:
        parameter, view = self.parameters[slot], self.views[slot]
        assert parameter.grad is not None
        grad = self._plain(slot, parameter.grad)
        if self._inside[slot]:
            view.add_(grad, alpha=self.scale)
        elif self.scale != 1.0:
            torch.mul(grad, self.scale, out=view)
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
        self._inside[slot] = True
        # What comes now comes alone, and is added.
        parameter.grad = None

    def _plain(self, slot: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient as numbers only."""
        if grad.requires_grad:
            self._graphs[slot], grad = grad, grad.detach()
        if grad.layout == torch.strided:
            return grad
        dense: torch.Tensor = grad.to_dense()
        return dense

    def fill(self, factor: float, here: bool = True) -> None:
        """Take what has not been taken, or zeros; multiply by this rank's weight; and say what has come.

        Args:
            factor: This rank's weight.
            here: Whether this rank has data: one that is through neither has a gradient nor lacks it.
        """
        self.started, self._factor = True, factor
        self._take_rest()
        if not factor:
            # What counts for nothing may be NaN, as a mean over no samples is.
            self.flat.zero_()
        elif factor != 1.0:
            self.flat.mul_(factor)
        if self.missing:
            lacks = [here and not came for came in self.came]
            self._words.copy_(torch.tensor([*self.came, *lacks], dtype=self._words.dtype).mul_(self.scale))
        else:
            count = len(self.parameters)
            self._words[:count].fill_(self.scale)
            self._words[count:].zero_()

    def _take_rest(self) -> None:
        """All that has not been taken, in one go: a call of torch's for each would take longer than the copying."""
        views, grads = [], []
        for slot, (parameter, view, inside) in enumerate(zip(self.parameters, self.views, self._inside, strict=True)):
            grad = parameter.grad
            if grad is None:
                if not inside:
                    view.zero_()
            elif inside:
                self._take(slot)
            else:
                views.append(view)
                grads.append(self._plain(slot, grad))
                self._inside[slot] = True
                parameter.grad = None
        if not views:
            return
        torch._foreach_copy_(views, grads)
        if self.scale != 1.0:
            # One call for all of the memory, where nothing in it has been multiplied yet.
            torch._foreach_mul_([self.flat] if len(views) == len(self.views) else views, self.scale)

    def present(self) -> list[tuple[bool, bool]]:
        """After the reduction, for each gradient: whether any rank had it, and whether any lacked it.

        Both are told by what is 0, for no count of many ranks is exact in 16 bits.
        """
        words: list[float | complex] = self._words.tolist()
        count = len(self.parameters)
        return [(had != 0, lacked != 0) for had, lacked in zip(words[:count], words[count:], strict=True)]

    def words(self) -> torch.Tensor:
        """What travels beside the gradients where those travel in another form."""
        return self._words

    def hand_out(self, present: Sequence[tuple[bool, bool]]) -> None:
        """Put the means where optimizers look; a gradient that no rank had stays what it was."""
        for slot, (had, _) in enumerate(present):
            if not had and not self._inside[slot]:
                continue
            graph = self._graphs.get(slot)
            if graph is not None:
                # The values become the mean; what the gradient was made of stays this rank's.
                graph.detach().copy_(self.views[slot])
                self.parameters[slot].grad = graph
            else:
                self.parameters[slot].grad = self.views[slot]

    def add_late(self) -> None:
        """Add to the means what came after them, so that another reduction takes it in."""
        factor = self._factor
        for view, parameter in zip(self.views, self.parameters, strict=True):
            grad = parameter.grad
            if grad is not None and grad.data_ptr() != view.data_ptr():
                if factor:
                    view.add_(grad.detach(), alpha=factor)
                parameter.grad = None
        self.memory.mul_(self.scale)


def _shaped(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view with the parameter's shape, and its order of memory where that has no gaps."""
    strides = dense_strides(like)
    return part.view(like.shape) if strides is None else part.as_strided(like.shape, strides)
