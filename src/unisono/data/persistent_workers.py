"""Check for persistent loader workers, which would otherwise silently skip samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

__all__ = ["WorkerEpochCheck"]


class WorkerEpochCheck:
    """Pass counter of a worker's copy of a dataset: a copy with a loaded state is good for one pass.

    Persistent workers (`persistent_workers=True`) do not see `set_epoch`, so in each epoch they would skip
    the samples that were trained on before the state was saved.
    """

    def __init__(self) -> None:
        self._begun = False

    def begin(self, resumed: bool) -> Iterator[Any] | None:
        """Return, for the second pass, an iterator that raises on `next`: only then does a worker forward errors."""
        if get_worker_info() is None or not resumed:
            return None
        again, self._begun = self._begun, True
        return _refusal() if again else None


def _refusal() -> Iterator[Any]:
    raise RuntimeError(
        "persistent_workers=True hides set_epoch() and restored state from the workers: recreate the DataLoader, "
        "or use persistent_workers=False"
    )
    yield
