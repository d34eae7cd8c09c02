"""`PartitionSampler`: a rank's samples and progress, and re-partitioning of an epoch when the ranks change."""

from __future__ import annotations

import hashlib
import operator
import warnings
import weakref
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from unisono.data.partitioner import Partitioner, equal_shares, resolve
from unisono.data.resharding import Evening, Resharding, ShardingPhase, added, deal
from unisono.data.resume_state import FORMAT, check_states, counts_of, gather_states, phases_of
from unisono.data.stateful_iterator import EpochProgress, SampleSource, StatefulIterator, walk
from unisono.data.workers import ranks_of, refuse_second_split

__all__ = ["EpochWarning", "PartitionSampler", "unchanged_on_error"]


class PartitionSampler(DistributedSampler[Any]):
    """Sampler of this rank's samples, in a new order each epoch; replaces torch's `DistributedSampler`.

    This class is a subclass of `DistributedSampler`, because frameworks such as Lightning test for that class, and
    would otherwise divide the samples again.

    Every sample of the dataset is assigned to exactly one rank, so some ranks may have one sample more than others;
    `drop_last` or `padding` makes the numbers equal. `advance` commits the samples that were trained on. The sampler's
    state counts only committed samples, not samples that a loader has prefetched. A state can be loaded mid-epoch on a
    different number of ranks: the remaining samples are distributed over the new ranks in their original order.

    Args:
        dataset: Anything with a length.
        comm: Any object with a `rank` and a `size`, which are read once. At most a weak reference to the object is
            kept.
        num_replicas, rank: Alternative to `comm`. If `comm`, `num_replicas` and `rank` are all None, torch's default
            process group is used if it is initialized; otherwise, there is a single rank.
        partition: A partitioner or its name; see `un.data.PARTITIONERS`.
        shuffle: Whether each epoch has a different order; if None, the partitioner's default.
        seed: Seed of the order; the same on all ranks.
        drop_last: Whether to drop surplus samples in each epoch, so that all ranks have the same number of samples.
        padding: Whether to repeat some samples, as torch's sampler does, so that all ranks have the same number of
            samples.

    Attributes:
        epoch: The current epoch, as set by `set_epoch`; initially 0.
        rule: The partitioner. All other attributes are named after the arguments.

    Raises:
        TypeError: The dataset has no length (see `StreamPartition`) or is a sampler, or `comm` has no rank and size.
        ValueError: Arguments contradict each other, `seed` is negative, or the partitioner is unknown. At the start of
            an epoch: ranks have drawn different samples (see `Sampled`), or Accelerate would divide the samples again.

    Cost: 20 ns per index. Memory: as needed by the partitioner; for the default one, less than 1 MiB at any dataset
    length.

    Example:
        >>> ranks = [un.data.PartitionSampler(range(10), num_replicas=3, rank=rank) for rank in range(3)]
        >>> [len(sampler) for sampler in ranks], sorted(sum(map(list, ranks), []))
        ([4, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        >>> for sampler in ranks:
        ...     sampler.set_epoch(1)
        ...     sampler.advance(2)
        >>> state = ranks[0].state_dict()
        >>> pair = [un.data.PartitionSampler(range(10), num_replicas=2, rank=rank) for rank in range(2)]
        >>> for sampler in pair:
        ...     sampler.load_state_dict(state)
        >>> [len(list(sampler)) for sampler in pair]
        [2, 2]
    """

    checkpoint_policy: ClassVar[str] = "all"

    def __init__(
        self,
        dataset: Sized,
        comm: Any = None,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        partition: str | Partitioner | type[Partitioner] = "shuffled",
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        padding: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(f"a {type(dataset).__name__} has no indices: use un.data.StreamPartition for streams")
        if isinstance(dataset, Sampler):
            raise TypeError(
                f"a {type(dataset).__name__} is a sampler: pass the dataset. If Lightning or Fabric has passed it, to "
                "divide the samples again, give them use_distributed_sampler=False"
            )
        if drop_last and padding:
            raise ValueError("drop_last and padding exclude each other")
        if operator.index(seed) < 0:
            raise ValueError(f"seed must be 0 or more, but is {seed}")
        self.dataset: Any = dataset
        self.rank: int
        self.num_replicas: int
        self.rank, self.num_replicas = ranks_of(comm, num_replicas, rank)
        self.compare_on(comm)
        self.rule: Partitioner = resolve(partition, dataset)
        self.shuffle: bool = self.rule.shuffles if shuffle is None else shuffle
        self.seed: int = operator.index(seed)
        self.drop_last = drop_last
        self.padding = padding
        self._begin(0)
        # Epoch passed to `set_epoch` since the last pass through the samples ended; None if `set_epoch` has not been
        # called since then.
        self._requested_epoch: int | None = None
        self._warned = self.rank > 0

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._phases: list[ShardingPhase] = []
        self._pass: EpochProgress | None = None

    def __iter__(self) -> StatefulIterator:
        """Iterate over this rank's uncommitted samples of this epoch, or over all samples if the epoch was complete.

        Rank 0 issues an `EpochWarning`, once, if an iteration has reached the end and `set_epoch` was not called
        afterwards.
        """
        refuse_second_split(self.num_replicas)
        current = self._now()
        again = current.ended and current.taken == current.start
        through = not current.over and (again or (current.complete and current.taken > current.start))
        unasked = self.shuffle and self._requested_epoch is None and not current.over
        if (through or current.ended) and unasked and not self._warned:
            self._warned = True
            left = f"continues with {self.remaining} samples not committed"
            action = "begins again, in the same order" if through else left
            hint = "call set_epoch(epoch) before each epoch; for evaluation, pass shuffle=False"
            warnings.warn(f"epoch {self.epoch} {action}: {hint}", EpochWarning, stacklevel=2)
        if through:
            self._begin(self.epoch)
            current = self._now()
        current.begun = True
        return walk(SampleSource(self, current))

    def __len__(self) -> int:
        """Return this rank's number of samples in this epoch, except those that a loaded state counts as committed."""
        current = self._now()
        return len(current.indices) - current.start

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch.

        Call this before each epoch. Setting the current epoch again changes nothing, so resuming a job is safe.

        Args:
            epoch: An integer, 0 or more. The order of a shuffled epoch depends on `epoch` and `seed`.

        Raises:
            ValueError: `epoch` is negative.
        """
        number = operator.index(epoch)
        if number < 0:
            raise ValueError(f"epoch must be 0 or more, but is {epoch}")
        self._requested_epoch = number
        if self._pass is not None:
            self._pass.over = False
        if number != self.epoch:
            self._begin(number)

    # `num_samples` and `total_size` are plain attributes in torch, but nothing outside the sampler assigns to them.
    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Length of the sampler, under the name that torch's `DistributedSampler` uses."""
        return len(self)

    @property
    def remaining(self) -> int:
        """Number of this rank's uncommitted samples."""
        current = self._now()
        return len(current.indices) - current.taken

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Sum of `len` over all ranks."""
        return sum(self._dealt(self.num_replicas, self.rule).lengths)

    def advance(self, count: int) -> None:
        """Commit this rank's next samples: mark them as trained on.

        With torchdata's StatefulDataLoader, `advance` is not needed.

        Args:
            count: Number of samples trained on since the last call, at most `remaining`.

        Raises:
            ValueError: `count` is negative, or more than `remaining`.
        """
        current = self._now()
        count = operator.index(count)
        if not 0 <= count <= self.remaining:
            raise ValueError(
                f"rank {self.rank} cannot have trained on {count} more samples: "
                f"{self.remaining} of its {len(current.indices)} are left in epoch {self.epoch}"
            )
        current.advance(count)
        if count and current.complete:
            self._requested_epoch = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's progress: plain numbers, strings, lists and dicts."""
        current = self._now()
        return self._walk_state(current, current.taken, current.through)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Resume where a job stopped, on any number of ranks. Call this on every rank.

        Args:
            state: State of one rank, which is sufficient if all ranks have progressed equally (ranks may all load the
                same rank's state, or each its own); or a list of the states of all ranks.

        Raises:
            ValueError: The state belongs to a different dataset or partitioner; or the other ranks' progress cannot be
                inferred from one state: parts are unequal, or loader workers were used and other ranks may have had one
                more sample.
        """
        states = [state] if isinstance(state, dict) else list(state)
        if not states:
            raise ValueError("there are no states to load")
        common = check_states(states, self._identity())
        with unchanged_on_error(self):
            self._resume(states, common)

    def _resume(self, states: Sequence[dict[str, Any]], common: dict[str, Any]) -> None:
        self._begin(common["epoch"])
        self.seed = common["seed"]
        self._phases = phases_of(common)
        if common["parts"] != self.num_replicas or self.num_replicas == 1 or common["settings"] != self.rule.settings():
            self._close(common, self._counts(states, common))
            return
        # If the parts have not changed, the progress of the other ranks does not matter.
        own = next((each for each in states if each["rank"] == self.rank), None)
        taken = self._counts(states, common)[self.rank] if own is None else int(own["taken"])
        current = self._now()
        if not 0 <= taken <= len(current.indices):
            raise ValueError(f"the state records {taken} samples used by this rank, which has {len(current.indices)}")
        current.start = current.taken = taken

    def rebuild(self, comm: Any, *, like: int | None = None, states: Sequence[dict[str, Any]] | None = None) -> None:
        """Move to a communicator with different ranks, and redistribute this epoch's uncommitted samples.

        Collective over `comm`. New ranks also call this method, on a sampler created with the same arguments. A lost
        rank is assumed to have advanced as far as the furthest survivor. Restart the iteration afterwards.

        Args:
            comm: The new communicator.
            like: Rank in `comm` whose progress all ranks adopt; broadcast that rank's model to all ranks afterwards.
            states: States of the ranks of `comm`, in rank order; if None, `comm.all_gather_object` exchanges them.

        Raises:
            ValueError: The ranks' samplers differ.
        """
        states = gather_states(comm, self.state_dict()) if states is None else states
        rank, size = ranks_of(comm)
        known = states if like is None else [states[like]]
        latest = max(state["epoch"] for state in known)
        here = [state for state in known if state["epoch"] == latest]
        old = [state for state in here if state["begun"]]
        common = check_states(old or here[:1], self._identity())
        with unchanged_on_error(self):
            self._begin(latest)
            self.seed = common["seed"]
            self.rank = rank
            self.num_replicas = size
            self._phases = phases_of(common)
            self.compare_on(comm)
            if old:
                self._close(common, self._counts(old, common, lost=True))
            self._now()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except the communicator, which cannot be pickled."""
        return {**vars(self), "_require_same": None}

    def compare_on(self, comm: Any) -> None:
        """Compare the samples drawn for each epoch with the samples that a communicator's other ranks draw.

        Args:
            comm: A `Communicator`, to which only a weak reference is kept. With any other object, nothing is compared.

        Example:
            >>> def program(comm):
            ...     rule = un.data.sampled(torch.utils.data.RandomSampler(range(4)))
            ...     sampler = un.data.PartitionSampler(range(4), num_replicas=1, rank=0, partition=rule)
            ...     sampler.compare_on(comm)
            ...     return len(list(sampler))
            >>> un.launch(program, 2, "thread")
            [4, 4]
        """
        same = getattr(comm, "_require_same", None)
        self._require_same = None if same is None else weakref.WeakMethod(same)

    def _identity(self) -> dict[str, Any]:
        return {"samples": len(self.dataset), "partition": self.rule.fingerprint(), "shuffle": self.shuffle}

    def _end(self, which: EpochProgress) -> None:
        which.end()
        if which is self._pass:
            self._requested_epoch = None

    def _now(self) -> EpochProgress:
        """Return the current pass. If the dataset has grown and nothing is committed yet, create a new pass."""
        held = self._pass
        if held is None or (held.state["samples"] != len(self.dataset) and not held.taken and not self._phases):
            indices = self._dealt(self.num_replicas, self.rule, compared=True).part(self.rank)
            fixed = {"format": FORMAT, "epoch": self.epoch, "seed": self.seed, **self._identity()}
            own = {"parts": self.num_replicas, "rank": self.rank, "settings": self.rule.settings()}
            held = self._pass = EpochProgress({**fixed, "phases": [p.plain() for p in self._phases], **own}, indices)
        return held

    def _dealt(self, parts: int, rule: Partitioner, *, compared: bool = False) -> Resharding:
        first = (self._phases[0].parts, rule.replaced(self._phases[0].settings)) if self._phases else (parts, rule)
        order = first[1].order(len(self.dataset), self.shuffle, self.seed, self.epoch, equal_shares(first[0]))
        same = self._require_same() if compared and rule.draws and self._require_same is not None else None
        if same is not None:
            drawn = repr(order.values(torch.arange(len(order)))).encode()
            wrong = ValueError(
                f"ranks have drawn different samples for epoch {self.epoch} from {rule.fingerprint()}: it draws from a "
                "generator that no seed reaches, or its input differs. Let it draw from an attribute `generator` (a "
                "torch.Generator), or from the global generators of torch, numpy or Python"
            )
            same(f"samples {self._identity()} {self.seed} {self.epoch}", hashlib.blake2b(drawn).digest(), wrong)
        evening: Evening = "drop" if self.drop_last else "pad" if self.padding else "none"
        return deal(rule, order, self._phases, parts, self.seed, evening)

    def _counts(self, states: Sequence[dict[str, Any]], common: dict[str, Any], lost: bool = False) -> list[int]:
        rule = self.rule.replaced(common["settings"])
        return counts_of(states, self._dealt(common["parts"], rule).lengths, rule.in_step, lost)

    def _close(self, common: dict[str, Any], counts: Sequence[int]) -> None:
        """End a phase in which part p used `counts[p]` samples; divide the other samples among the current ranks."""
        rule = self.rule.replaced(common["settings"])
        lengths = [len(part) for part in self._dealt(common["parts"], rule).parts]
        taken = tuple(min(count, length) for count, length in zip(counts, lengths, strict=True))
        self._phases = added(self._phases, ShardingPhase(common["parts"], taken, common["settings"]), rule, lengths)

    def _walk_state(self, progress: EpochProgress, given: int, through: bool | None) -> dict[str, Any]:
        """Return the state of an iteration after its first `given` samples are committed."""
        through = through and given == len(progress.indices)
        begun = progress.begun or given > 0 or bool(progress.state["phases"])
        return {**progress.state, "taken": given, "through": through, "begun": begun}

    def _load_walk(self, state: dict[str, Any]) -> SampleSource:
        """Load the state of an iteration, and return the samples with which to resume.

        If the state's epoch was complete, the iteration starts over, unless `set_epoch` has requested that same epoch:
        in this case, it yields nothing until the next `set_epoch`, because other ranks may have samples left.
        """
        requested = self._requested_epoch
        self.load_state_dict(state)
        current = self._now()
        source = SampleSource(self, current)
        current.over = current.complete and requested == self.epoch
        if current.complete and not current.over:
            self._end(current)
            if requested is not None:
                self.set_epoch(requested)
        return source


class EpochWarning(UserWarning):
    """Warning that an epoch was restarted without `set_epoch`, so its samples have the same order as in the last pass.

    Example:
        >>> import warnings
        >>> sampler = un.data.PartitionSampler(range(2))
        >>> for _ in sampler:
        ...     sampler.advance(1)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     first = next(iter(sampler))
        >>> caught[0].category is un.data.EpochWarning
        True
    """


@contextmanager
def unchanged_on_error(instance: Any) -> Iterator[None]:
    """Restore the object's attributes if the `with` block raises an exception."""
    before = dict(vars(instance))
    try:
        yield
    except BaseException:
        vars(instance).update(before)
        raise
