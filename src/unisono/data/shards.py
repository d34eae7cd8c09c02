"""Shards: a dataset in many local or remote files, each read by one worker of one rank."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from unisono.data.feistel import IndexShuffle
from unisono.data.workers import HiddenWorker, WorkerEpochCheck, ranks_of, refuse_second_split
from unisono.host.distribution import required

__all__ = ["ShardPartition", "read_lines"]

T_co = TypeVar("T_co", covariant=True)

_FORMAT = "shards 1"
_Job = tuple[int, int]  # Index of a shard, and how many of its samples to skip.


def read_lines(url: str) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 text file, without line ends. The file is opened when the first line is requested.

    Args:
        url: A local path, or a URL with a scheme (such as `s3://` or `https://`), which fsspec opens.

    Yields: Each line as a string.

    Raises:
        UnavailableError: `url` is a URL, and fsspec is not installed.
        OSError: The file cannot be opened.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "shard.txt"
        >>> _ = path.write_text("a line\nand another\n")
        >>> list(un.data.read_lines(str(path)))
        ['a line', 'and another']
    """
    if "://" not in url:
        with open(url, encoding="utf-8") as file:  # noqa: PTH123 - it may be any path-like text
            yield from (line.rstrip("\n") for line in file)
        return
    fsspec = required("fsspec", f"{url} needs fsspec", "remote")
    with fsspec.open(url, "rt", encoding="utf-8") as file:
        yield from (line.rstrip("\n") for line in file)


class ShardPartition(IterableDataset[T_co]):
    """Samples of the shards that are assigned to this rank and this loader worker.

    Each shard is read from its beginning by one worker of one rank, and other workers don't open it. Every sample is
    returned exactly once, for any number of ranks and workers.

    A loader's persistent workers (`persistent_workers=True`) do not see `set_epoch`, and so repeat the epoch in which
    they started. After a resume, persistent workers raise `RuntimeError` when the second epoch begins.

    Args:
        shards: Names or URLs; the same list on every rank. If there are fewer shards than workers, counted over all
            ranks, some workers don't get a shard.
        read: Function that takes a shard's name and returns its samples, in the same order each time.
        comm, num_replicas, rank: As for `PartitionSampler`.
        shuffle: Whether to shuffle the order of shards in each epoch. Samples within a shard keep their order.
        seed: Seed of the order; the same on all ranks.

    Attributes:
        epoch: The current epoch, as set by `set_epoch`; initially 0.
        rank, num_replicas: This rank, and the number of ranks.

    Raises:
        TypeError, ValueError: `comm`, `num_replicas` or `rank` is invalid (see `PartitionSampler`); or shards are
            shuffled and `seed` is invalid.

    Balance: two ranks' shard counts differ by at most one, so with shards of equal length, their sample counts differ
    by at most one shard's length.

    Example:
        >>> files = {"a": [1, 2], "b": [3], "c": [4, 5, 6]}
        >>> ranks = [un.data.ShardPartition(list(files), files.get, num_replicas=2, rank=r) for r in range(2)]
        >>> sorted(sample for rank in ranks for sample in rank)
        [1, 2, 3, 4, 5, 6]
        >>> alone = un.data.ShardPartition(list(files), files.get, shuffle=False)
        >>> len(list(alone)), alone.advance(4)
        (6, None)
        >>> resumed = un.data.ShardPartition(list(files), files.get, shuffle=False)
        >>> resumed.load_state_dict(alone.state_dict())
        >>> list(resumed)
        [5, 6]
    """

    def __init__(
        self,
        shards: Sequence[str],
        read: Callable[[str], Iterable[T_co]],
        comm: Any = None,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.shards: list[str] = list(shards)
        self._read = read
        self.rank: int
        self.num_replicas: int
        self.rank, self.num_replicas = ranks_of(comm, num_replicas, rank)
        self.shuffle = shuffle
        self.seed: int = operator.index(seed)
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._resumed = False
        # This rank's progress: the number of completed shards, and the number of samples used from the next shard.
        self._done = 0
        self._skip = 0
        # The total length of the first n shards that this process has read, for n from 0, and the number of samples
        # read so far from the current shard.
        self._ends = [0]
        self._reading = 0
        self._passes = WorkerEpochCheck()
        order = IndexShuffle(len(self.shards), self.seed, epoch) if self.shuffle else range(len(self.shards))
        self._jobs: list[_Job] = [(shard, 0) for shard in order]

    def __iter__(self) -> Iterator[T_co]:
        refuse_second_split(self.num_replicas)
        return self._passes.begin(bool(self._done or self._skip or self._resumed)) or _ShardIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. Setting the current epoch again changes nothing.

        Args:
            epoch: A whole number, 0 or more.
        """
        if operator.index(epoch) != self.epoch:
            self._begin(operator.index(epoch))

    def advance(self, count: int) -> None:
        """Commit this rank's next `count` samples, for a loader without workers.

        The next iteration resumes after the committed samples. With workers, use torchdata's StatefulDataLoader to save
        the state, because only workers know where a shard ends.

        Args:
            count: Number of samples trained on since the last call.

        Raises:
            ValueError: `count` is negative, or exceeds the number of samples that this process has read.
        """
        more = operator.index(count)
        if more < 0:
            raise ValueError(f"a rank cannot have trained on {count} more samples")
        if not more:
            return
        position = self._ends[self._done] + self._skip + more
        if position > self._ends[-1] + self._reading:
            raise ValueError(f"this process has not read {count} more samples; with loader workers it cannot know")
        # The last of several equal ends: shards without samples are complete as soon as they are reached.
        self._done = bisect_right(self._ends, position) - 1
        self._skip = position - self._ends[self._done]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's progress as plain values."""
        own = {"parts": self.num_replicas, "rank": self.rank, "done": self._done, "skip": self._skip}
        jobs = [list(job) for job in self._jobs] if self._resumed else None
        common = {"format": _FORMAT, "epoch": self.epoch, "seed": self.seed, "shards": len(self.shards), "jobs": jobs}
        return {**common, **own}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Resume where a job stopped.

        Args:
            state: This rank's state, if the number of ranks is unchanged; or a list of all ranks' states, for any
                number of ranks.

        Raises:
            ValueError: The states are from different jobs or points in time, or for a different number of shards; or
                the number of ranks has changed, and a rank's state is missing.
        """
        states = [state] if isinstance(state, dict) else list(state)
        keys = ("format", "epoch", "seed", "shards", "jobs", "parts")
        if not states or any(s.get("format") != _FORMAT or any(s[k] != states[0][k] for k in keys) for s in states):
            raise ValueError("the states must be those of a ShardPartition, from one job at one time")
        first = states[0]
        if first["shards"] != len(self.shards):
            raise ValueError(f"the state has {first['shards']} shards, but this partition has {len(self.shards)}")
        by_rank = {s["rank"]: s for s in states}
        same = first["parts"] == self.num_replicas and self.rank in by_rank
        if not same and len(by_rank) < first["parts"]:
            raise ValueError(f"ranks read shards at their own pace: pass the states of all {first['parts']}, as a list")
        self.seed = first["seed"]
        self._begin(first["epoch"])
        if first["jobs"] is not None:
            self._jobs = [(job[0], job[1]) for job in first["jobs"]]
            self._resumed = True
        if same:
            self._done = by_rank[self.rank]["done"]
            self._skip = by_rank[self.rank]["skip"]
            self._ends = [0] * (self._done + 1)
        else:
            self._close([(by_rank[rank]["done"], by_rank[rank]["skip"]) for rank in range(first["parts"])])

    def _jobs_of(self, worker: int, workers: int) -> list[_Job]:
        """Return the shards that one worker of this rank reads, and how many samples of each to skip."""
        mine = self._jobs[self.rank :: self.num_replicas][self._done :]
        if mine and self._skip:
            mine[0] = mine[0][0], mine[0][1] + self._skip
        return mine[worker::workers]

    def _close(self, progress: Sequence[tuple[int, int]]) -> None:
        left: list[tuple[int, _Job]] = []
        for rank, (done, skip) in enumerate(progress):
            for turn, (shard, before) in enumerate(self._jobs[rank :: len(progress)]):
                if turn >= done:
                    left.append((turn * len(progress) + rank, (shard, before + (skip if turn == done else 0))))
        self._jobs = [job for _, job in sorted(left)]
        self._resumed = True


class _ShardIterator(Iterator[T_co]):
    """Iterator of one worker over its shards. torchdata's loader saves the iterator's state with the worker's state."""

    def __init__(self, of: ShardPartition[T_co]) -> None:
        worker = get_worker_info()
        self._of = of
        self._alone = worker is None
        self._jobs = of._jobs_of(*((0, 1) if worker is None else (worker.id, worker.num_workers)))
        self._first = of._done
        self._skipped = of._skip
        self._at = 0
        self._taken = 0
        self._items: Iterator[T_co] | None = None

    def __next__(self) -> T_co:
        while self._at < len(self._jobs):
            if self._items is None:
                self._open(self._taken)
            assert self._items is not None
            for item in self._items:
                self._taken += 1
                self._record(False)
                return item
            self._record(True)
            self._at = self._at + 1
            self._taken = 0
            self._items = None
        raise StopIteration

    def _open(self, more: int) -> None:
        shard, skip = self._jobs[self._at]
        self._items = HiddenWorker(lambda: self._of._read(self._of.shards[shard]))
        for _ in zip(range(skip + more), self._items, strict=False):
            pass

    def _record(self, complete: bool) -> None:
        """Record where shards end, for use by `advance`; only in a process without loader workers."""
        of = self._of
        number = self._first + self._at
        if not self._alone or number < len(of._ends) - 1:
            return
        so_far = self._taken + (self._skipped if self._at == 0 else 0)
        if complete:
            of._ends.append(of._ends[-1] + so_far)
        of._reading = 0 if complete else so_far

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]
        self._taken = state["taken"]
        self._items = None
