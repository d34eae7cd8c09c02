"""Iteration that does not know of loader workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data._utils import worker

__all__ = ["HiddenWorker"]

T_co = TypeVar("T_co", covariant=True)


class HiddenWorker(Iterator[T_co]):
    """All samples of an iterable, in a loader worker too.

    A dataset that divides itself among the workers, by torch's `get_worker_info`, sees none while it runs:
    its reader divides the samples, and a second division would leave samples out.

    Args:
        make: Returns the iterable.
    """

    def __init__(self, make: Callable[[], Iterable[T_co]]) -> None:
        self._items: Iterator[T_co] = _hidden(lambda: iter(make()))

    def __next__(self) -> T_co:
        item: T_co = _hidden(next, self._items)
        return item


def _hidden(call: Callable[..., Any], *given: Any) -> Any:
    info: Any = worker
    before = info._worker_info
    info._worker_info = None
    try:
        return call(*given)
    finally:
        info._worker_info = before
