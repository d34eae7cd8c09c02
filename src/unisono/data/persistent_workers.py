"""What a loader's workers that live on would get wrong in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

__all__ = ["WorkerEpochCheck"]


class WorkerEpochCheck:
    """Counts a worker's ways through its copy of a dataset: one that a state was loaded into is good for one.

    Workers that live on (`persistent_workers=True`) do not hear of `set_epoch`, so in each epoch they would leave out
    what was trained on before the state was saved.
    """

    def __init__(self) -> None:
        self._begun = False

    def begin(self, resumed: bool) -> Iterator[Any] | None:
        """If this is the second, what raises when it is asked for a sample: only then does a worker pass errors on."""
        if get_worker_info() is None or not resumed:
            return None
        again, self._begun = self._begun, True
        return _refusal() if again else None


def _refusal() -> Iterator[Any]:
    raise RuntimeError(
        "workers that live on do not hear of set_epoch, and would leave out again what was used before the state was "
        "saved: make the loader anew, or without persistent_workers"
    )
    yield
