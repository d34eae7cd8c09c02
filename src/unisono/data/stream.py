"""Streams: datasets that can only be read from the beginning, and that are divided among ranks and loader workers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from unisono.data.resharding import leftover
from unisono.data.workers import HiddenWorker, WorkerEpochCheck, ranks_of, refuse_second_split

__all__ = ["StreamPartition"]

T_co = TypeVar("T_co", covariant=True)

_FORMAT = "stream 1"


class StreamPartition(IterableDataset[T_co]):
    """This rank's share of a stream that every rank reads: each sample goes to exactly one worker of one rank.

    Samples are assigned to ranks round-robin, so the ranks' counts differ by at most one. Within a rank, whole batches
    are assigned to the workers of a `DataLoader` round-robin. So the samples that a training loop has used are always
    the first ones of its rank's share, for any number of workers. A state can therefore be loaded with a different
    number of ranks and workers.

    A loader's persistent workers (`persistent_workers=True`) do not see `set_epoch`, and so keep the epoch in which
    they started. After a resume, persistent workers raise `RuntimeError` when the second epoch begins.

    Args:
        dataset: An iterable that yields the same samples each time, in all workers of a loader. While the iterable
            runs, `get_worker_info` returns None, so that even a dataset that divides itself among workers yields all
            its samples. If the dataset has a method `set_epoch`, this object's `set_epoch` calls it.
        comm, num_replicas, rank: As for `PartitionSampler`.
        batch_size: The loader's batch size, if it has workers.

    Attributes:
        epoch: The current epoch, as set by `set_epoch`; initially 0.
        dataset, rank, num_replicas, batch_size: The arguments, or the defaults that replace them.

    Raises:
        TypeError, ValueError: `comm`, `num_replicas` or `rank` is invalid (see `PartitionSampler`); or `batch_size` is
            less than 1.

    Cost: every worker of every rank reads the whole stream; if that is too slow, split the data into shards (see
    `ShardPartition`).

    Example:
        >>> ranks = [un.data.StreamPartition("abcde", num_replicas=2, rank=rank) for rank in range(2)]
        >>> [list(share) for share in ranks]
        [['a', 'c', 'e'], ['b', 'd']]
        >>> for share in ranks:
        ...     share.advance(1)
        >>> alone = un.data.StreamPartition("abcde")
        >>> alone.load_state_dict([share.state_dict() for share in ranks])
        >>> list(alone)
        ['c', 'd', 'e']
    """

    def __init__(
        self,
        dataset: Iterable[T_co],
        comm: Any = None,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        batch_size: int = 1,
    ) -> None:
        if operator.index(batch_size) < 1:
            raise ValueError(f"batch_size must be 1 or more, but is {batch_size}")
        self.dataset = dataset
        self.rank: int
        self.num_replicas: int
        self.rank, self.num_replicas = ranks_of(comm, num_replicas, rank)
        self.batch_size = batch_size
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        # Positions that were committed before the number of ranks changed: all below `_edge`, except `_holes`.
        self._edge = 0
        self._holes: list[int] = []
        self._taken = 0
        self._passes = WorkerEpochCheck()

    def __iter__(self) -> Iterator[T_co]:
        refuse_second_split(self.num_replicas)
        return self._passes.begin(bool(self._taken or self._edge)) or _StreamIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, also in a dataset that has `set_epoch`. If `epoch` is current, the progress is kept.

        Args:
            epoch: An integer.
        """
        epoch = operator.index(epoch)
        if epoch != self.epoch:
            self._begin(epoch)
        if callable(forward := getattr(self.dataset, "set_epoch", None)):
            forward(epoch)

    def advance(self, count: int) -> None:
        """Commit this rank's next `count` samples. The next iteration resumes after the committed samples.

        Args:
            count: Number of samples trained on since the last call; not checked against the stream's length, which is
                unknown.

        Raises:
            ValueError: `count` is negative.
        """
        if operator.index(count) < 0:
            raise ValueError(f"a rank cannot have trained on {count} more samples")
        self._taken += operator.index(count)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's progress as plain values."""
        own = {"parts": self.num_replicas, "rank": self.rank, "taken": self._taken}
        return {"format": _FORMAT, "epoch": self.epoch, "edge": self._edge, "holes": self._holes, **own}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Resume where a job stopped, on any number of ranks.

        Args:
            state: State of one rank, which is sufficient if all ranks have used the same number of samples; or a list
                of all ranks' states, which is needed if ranks reached the end of the stream at different times.

        Raises:
            ValueError: The states are not from a `StreamPartition`, or are from different jobs or times.
        """
        states = [state] if isinstance(state, dict) else list(state)
        keys = ("format", "epoch", "edge", "holes", "parts")
        if not states or any(s.get("format") != _FORMAT or any(s[k] != states[0][k] for k in keys) for s in states):
            raise ValueError("the states must be those of a StreamPartition, from one job at one time")
        first = states[0]
        self._begin(first["epoch"])
        self._edge = first["edge"]
        self._holes = list(first["holes"])
        taken = {s["rank"]: s["taken"] for s in states}
        if first["parts"] == self.num_replicas and self.rank in taken:
            self._taken = taken[self.rank]
            return
        counts = [taken.get(rank, max(taken.values())) for rank in range(first["parts"])]
        self._close(counts)

    def _position(self, number: int) -> int:
        """Return the stream position of uncommitted sample `number`, counted from 0."""
        return self._holes[number] if number < len(self._holes) else self._edge + number - len(self._holes)

    def _close(self, counts: Sequence[int]) -> None:
        # Choose a range that includes all holes and all committed samples.
        count = max((max(counts) + 1) * len(counts), len(self._holes))
        pieces = leftover([range(part, count, len(counts)) for part in range(len(counts))], counts, count)
        left = [self._position(int(number)) for piece in pieces for number in piece]
        edge = self._position(count)
        # Uncommitted positions directly below the edge need not be listed as holes: lower the edge instead.
        while left and left[-1] == edge - 1:
            edge = left.pop()
        self._edge = edge
        self._holes = left


class _StreamIterator(Iterator[T_co]):
    """Iterator of one worker over the stream. torchdata's loader saves the iterator's state with the worker's state."""

    def __init__(self, of: StreamPartition[T_co]) -> None:
        worker = get_worker_info()
        self._worker, self._workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._of = of
        self._start = of._taken
        self._read = 0
        self._seen = 0
        self._items = HiddenWorker(lambda: of.dataset)
        self._holes = frozenset(of._holes)

    def __next__(self) -> T_co:
        of = self._of
        while True:
            item = next(self._items)
            position = self._read
            self._read = self._read + 1
            if position < of._edge and position not in self._holes:
                continue
            number = self._seen
            self._seen = self._seen + 1
            turn, part = divmod(number, of.num_replicas)
            if part != of.rank or turn < self._start:
                continue
            if (turn - self._start) // of.batch_size % self._workers == self._worker:
                return item

    def state_dict(self) -> dict[str, Any]:
        return {"read": self._read, "seen": self._seen, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._items = HiddenWorker(lambda: self._of.dataset)
        for _ in zip(range(state["read"]), self._items, strict=False):
            pass
        self._read = state["read"]
        self._seen = state["seen"]
        self._start = state["start"]
