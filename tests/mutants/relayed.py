"""What mutants change a little of: works that pass everything on."""

from __future__ import annotations

import torch

from unisono.types import Work

__all__ = ["Relayed"]


class Relayed(Work):
    """Another work, seen through this one."""

    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def get_future(self) -> torch.futures.Future[None]:
        return self._inner.get_future()
