"""Work under way, in the form that torch's callers expect, those in C++ included."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.core.types import Work
from unisono.core.work import WorkGroup

__all__ = ["TorchWork", "together"]

_ALWAYS = timedelta(0)
_KEPT_BYTES = 4096
_dropped: deque[TorchWork] = deque(maxlen=1024)


class TorchWork(dist.Work):
    """Torch `Work` over a unisono work.

    Torch's C++ code holds only its own part of one that Python hands to it, as `DDP.join` does, and finds methods by
    way of the Python part. So that one is kept when Python has dropped it: the last 1,024 of a process, since nothing
    tells how long C++ holds its part. Long tensors are not kept with it; `DDP.join` asks for one number.

    Args:
        work: What is under way, or None if it is done.
        tensors: What the future holds in the end.
    """

    def __init__(self, work: Work | None, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._tensors = work, list(tensors)

    def __del__(self) -> None:
        # Sparse tensors have no `nbytes`.
        if sum(tensor.numel() * tensor.element_size() for tensor in self._tensors) > _KEPT_BYTES:
            self._tensors = []
        _dropped.append(self)

    def wait(self, timeout: timedelta = _ALWAYS) -> bool:
        """Return True when it is done, or raise its error. A time of zero, torch's default, is the group's timeout."""
        if self._work is not None:
            self._work.wait(timeout.total_seconds() if timeout > _ALWAYS else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None if self._work is None else self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return -1 if self._work is None else self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors. Its error is torch's, with ours as text, so that C++ code sees it as one."""
        if self._work is None:
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(self._tensors)
            return done
        return self._work.get_future().then(self._outcome)

    def _outcome(self, _ended: object) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors


def together(works: Sequence[TorchWork]) -> TorchWork:
    """Several works as one, which holds the tensors of all of them."""
    group = WorkGroup([work._work for work in works if work._work is not None])
    return TorchWork(group, [tensor for work in works for tensor in work.result()])
