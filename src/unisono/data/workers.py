"""Helpers for datasets: find the process's rank, and keep loader workers and Accelerate from dividing samples again."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

from unisono.core.flight_recorder import with_callers

__all__ = ["HiddenWorker", "WorkerEpochCheck", "ranks_of", "refuse_second_split"]

T_co = TypeVar("T_co", covariant=True)


class HiddenWorker(Iterator[T_co]):
    """Iterator over all samples of an iterable, even in a loader worker.

    While the iterable runs, torch's `get_worker_info` returns None, so that a dataset does not divide itself among the
    workers. The caller already divides the samples, and a second division would lose some of them.

    Args:
        make: Function that returns the iterable.
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


class WorkerEpochCheck:
    """Check for second passes over a worker's copy of a dataset. A copy with a loaded state is valid for only one pass.

    Persistent workers (`persistent_workers=True`) do not see `set_epoch`, so they would skip the samples before the
    saved position in every epoch.
    """

    def __init__(self) -> None:
        self._begun = False

    def begin(self, resumed: bool) -> Iterator[Any] | None:
        """On a second pass, return an iterator whose `next` raises, because workers forward only errors from `next`."""
        if get_worker_info() is None or not resumed:
            return None
        again = self._begun
        self._begun = True
        return _refusal() if again else None


def _refusal() -> Iterator[Any]:
    raise RuntimeError(
        "persistent_workers=True hides set_epoch() and restored state from the workers: recreate the DataLoader, "
        "or use persistent_workers=False"
    )
    yield


def ranks_of(comm: Any = None, num_replicas: int | None = None, rank: int | None = None) -> tuple[int, int]:
    """Return this rank and the number of ranks.

    Args:
        comm: Any object with a `rank` and a `size`, as values or methods, such as a `Communicator`, an mpi4py
            communicator or a torch process group.
        num_replicas, rank: Alternative to `comm`. If `comm`, `num_replicas` and `rank` are all None, torch's default
            process group is used if it is initialized; otherwise, there is a single rank.

    Raises:
        TypeError: `comm` has no rank and size, or `rank` or `num_replicas` is not an integer.
        ValueError: `comm` was passed together with `num_replicas` or `rank`; only one of `num_replicas` and `rank` was
            passed; or the rank is out of range.

    Example:
        >>> ranks_of(num_replicas=4, rank=3)
        (3, 4)
    """
    if comm is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError("pass comm, or num_replicas and rank, but not both")
        try:
            known = [getattr(comm, name) for name in ("rank", "size")]
        except AttributeError as error:
            raise TypeError(
                f"comm must have a rank and a size, which a {type(comm).__name__} has not; without a communicator "
                "pass num_replicas=... and rank=..."
            ) from error
        rank, num_replicas = (value() if callable(value) else value for value in known)
    elif num_replicas is None and rank is None:
        grouped = dist.is_available() and dist.is_initialized()
        rank, num_replicas = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    elif num_replicas is None or rank is None:
        raise ValueError("num_replicas and rank belong together; pass both, or a communicator")
    number = operator.index(rank)
    size = operator.index(num_replicas)
    if not 0 <= number < size:
        raise ValueError(f"rank {number} is out of range: {size} ranks are numbered from 0 to {size - 1}")
    return number, size


_DIVIDING = "BatchSamplerShard.", "DataLoaderDispatcher.", "IterableDatasetShard."


def refuse_second_split(ranks: int) -> None:
    """Raise `ValueError` if Accelerate's `prepare` would divide the caller's samples a second time.

    Accelerate neither detects distributed samplers nor offers a hook for that, so this function looks for Accelerate's
    classes in the call stack.

    Args:
        ranks: Number of ranks among which the caller divides the samples.
    """
    divided = ranks > 1 and "accelerate.data_loader" in sys.modules
    for frame in with_callers(sys._getframe() if divided else None):
        named = frame.f_globals.get("__name__") == "accelerate.data_loader"
        if named and frame.f_code.co_qualname.startswith(_DIVIDING):
            raise ValueError(
                f"Accelerate divides this rank's part of the samples among the {ranks} ranks again, so that most are "
                "left out. Leave the loader out of accelerator.prepare(), or divide the samples by prepare() alone"
            )
