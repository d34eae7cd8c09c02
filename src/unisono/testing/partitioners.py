"""Checks for partitioners and for functions that divide samples; a failed check raises `AssertionError`.

    check_partitioner(un.data.PARTITIONERS["strided"].of, Samples(1000), sizes=[0.5, 0.3, 0.2], seed=0)

The checks create a separate partitioner for each rank, as in a real job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from unisono.data.indices import Indices, taken_from
from unisono.data.partitioner import Partitioner, equal_shares
from unisono.data.resharding import Resharding, ShardingPhase, deal

__all__ = [
    "Divide",
    "Make",
    "PartitionResult",
    "Samples",
    "check_balance",
    "check_cover",
    "check_division",
    "check_lossless",
    "check_partitioner",
    "check_resume",
    "check_same_everywhere",
    "check_seed",
]

Make = Callable[[Any], Partitioner]
"""Factory of a partitioner for a dataset, such as `PARTITIONERS["strided"].of`."""


class PartitionResult(Protocol):
    """Protocol for samples divided into parts, such as a `DataPartitioner`.

    Example:
        >>> result: PartitionResult = un.data.DataPartitioner(range(4), [0.5, 0.5], partition="strided")
        >>> list(result.use(rank=1))
        [1, 3]
    """

    def use(self, rank: int) -> Iterable[int]:
        """Return a rank's samples.

        Args:
            rank: From 0 to the number of parts - 1.
        """
        ...


Divide = Callable[[Sequence[int], Sequence[float], int], PartitionResult]
"""Function that takes samples, fractions and a seed, and divides the samples, such as `DataPartitioner`."""


class Samples(torch.utils.data.Dataset[int]):
    """A dataset with all the metadata that partitioners may use; sample i is the number i.

    Args:
        count: Number of samples.
        seed: Seed for the metadata: labels and groups of very different sizes, and integer costs, some of them 0.
        kinds: Maximum number of labels and of groups.

    Attributes:
        targets, groups, costs: One-dimensional tensors.
    """

    def __init__(self, count: int, seed: int = 0, kinds: int = 10) -> None:
        self._count = count
        generator = torch.Generator().manual_seed(seed)

        def skewed(most: int) -> torch.Tensor:
            return (torch.rand(count, generator=generator).square() * most).long()

        self.targets: torch.Tensor = skewed(kinds)
        self.groups: torch.Tensor = skewed(5 * kinds)
        self.costs: torch.Tensor = skewed(1000)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def check_partitioner(make: Make, dataset: Any, sizes: Sequence[float], seed: int) -> None:
    """Run all checks on one division: it must lose no sample, be equal on all ranks, and be as balanced as declared.

    Args:
        make: Factory of the partitioner.
        dataset: A dataset such as `Samples`.
        sizes: Fraction of the samples in each part; the fractions sum to 1.
        seed: 0 or more.

    Raises: AssertionError otherwise.

    Example:
        >>> from unisono.data import PARTITIONERS
        >>> check_partitioner(PARTITIONERS["grouped"].of, Samples(100), sizes=[0.7, 0.2, 0.1], seed=0)
    """
    for check in (check_lossless, check_same_everywhere, check_balance):
        check(make, dataset, sizes, seed)


def check_lossless(make: Make, dataset: Any, sizes: Sequence[float], seed: int) -> None:
    """Check that every sample is in exactly one part, and that a part's positions ascend.

    Args:
        make, dataset, sizes, seed: As in `check_partitioner`.

    Raises: AssertionError otherwise.

    Example:
        >>> check_lossless(un.data.PARTITIONERS["strided"].of, Samples(10), [0.7, 0.3], seed=0)
    """
    order, parts = _divided(make, dataset, sizes, seed)
    assert len(parts) == len(sizes), f"{len(sizes)} parts were requested, but {len(parts)} returned"
    check_cover([order.take(part) for part in parts], len(dataset))
    for number, part in enumerate(parts):
        assert bool((part[1:] > part[:-1]).all()), f"the places of part {number} do not ascend: {part.tolist()}"


def check_same_everywhere(make: Make, dataset: Any, sizes: Sequence[float], seed: int) -> None:
    """Check that two ranks compute the same parts, and leave the global random generators unchanged.

    Args:
        make, dataset, sizes, seed: As in `check_partitioner`.

    Raises: AssertionError otherwise.

    Example:
        >>> check_same_everywhere(un.data.PARTITIONERS["dirichlet"].of, Samples(10), [0.7, 0.3], seed=0)
    """
    with _undisturbed():
        (first, ours), (second, theirs) = (_divided(make, dataset, sizes, seed) for _ in range(2))
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        same = torch.equal(first.take(mine), second.take(other))
        assert same, f"part {number} differs between ranks"


def check_balance(make: Make, dataset: Any, sizes: Sequence[float], seed: int) -> None:
    """Check that each part's load is within the partitioner's declared bounds, and that declared groups are not split.

    Args:
        make, dataset, sizes, seed: As in `check_partitioner`.

    Raises: AssertionError otherwise.

    Example:
        >>> check_balance(un.data.PARTITIONERS["balanced"].of, Samples(10), [0.7, 0.3], seed=0)
    """
    order, parts = _divided(make, dataset, sizes, seed)
    _check_balance(make(dataset), order, [order.take(part) for part in parts], sizes)


def check_resume(
    make: Make, dataset: Any, counts: Sequence[int], taken: Sequence[Sequence[float]], seed: int, epoch: int = 0
) -> None:
    """Check that successive phases cover each sample exactly once, even if ranks stop partway through their parts.

    In each phase, the remaining samples must be divided as evenly as those of a whole epoch.

    Args:
        make, dataset: As in `check_partitioner`.
        counts: Number of ranks in each phase.
        taken: In each phase but the last, the fraction (0 to 1) of its part that each rank consumes.
        seed, epoch: 0 or more.

    Raises: AssertionError otherwise.

    Example:
        >>> check_resume(un.data.PARTITIONERS["grouped"].of, Samples(10), [2, 3], taken=[[0.5, 1.0]], seed=0)
    """
    rule = make(dataset)
    order = rule.order(len(dataset), rule.shuffles, seed, epoch, equal_shares(counts[0]))
    phases: list[ShardingPhase] = []
    committed: list[torch.Tensor] = []
    for number, parts in enumerate(counts):
        now = deal(make(dataset), order, phases, parts, seed)
        held = [now.part(part).all() for part in range(parts)]
        check_cover([*committed, *held], len(dataset))
        _check_balance(rule, now.rest, held, equal_shares(parts))
        if number + 1 < len(counts):
            ends = [round(share * len(part)) for share, part in zip(taken[number], held, strict=True)]
            committed += [part[:end] for part, end in zip(held, ends, strict=True)]
            phases.append(ShardingPhase(parts, tuple(ends), rule.settings()))


def check_division(divide: Divide, count: int, sizes: Sequence[float], seed: int) -> None:
    """Check that the parts contain all samples, are the same on all ranks, and are within one sample of their sizes.

    Args:
        divide: Function that divides samples.
        count: Number of samples, which are the integers from 0 to `count` - 1.
        sizes, seed: As in `check_partitioner`.

    Raises: AssertionError otherwise.

    Example:
        >>> from unisono.data import DataPartitioner
        >>> check_division(DataPartitioner, count=10, sizes=[0.7, 0.2, 0.1], seed=0)
    """
    with _undisturbed():
        held, again = (_held(divide, count, sizes, seed) for _ in range(2))
    assert held == again, f"two equal calls, with seed {seed}, returned {held} and {again}"
    check_cover([torch.tensor(part, dtype=torch.int64) for part in held], count)
    for rank, (part, size) in enumerate(zip(held, sizes, strict=True)):
        # Allow for rounding of the fractions.
        assert abs(len(part) - size * count) < 1 + 1e-6, f"part {rank} has {len(part)} of {count}, but size {size}"


def check_seed(divide: Divide) -> None:
    """Check that samples are shuffled, and that a different seed shuffles them differently.

    Args:
        divide: Function that divides samples.

    Raises: AssertionError otherwise.

    Example:
        >>> check_seed(un.data.DataPartitioner)
    """
    orders = [_held(divide, 100, [0.5, 0.5], seed)[0] for seed in (1, 2)]
    for order in orders:
        assert order != sorted(order), "the samples of a part are in their old order"
    assert orders[0] != orders[1], "seeds 1 and 2 shuffle alike"


def check_cover(parts: Sequence[torch.Tensor], count: int) -> None:
    """Check that the parts together contain each number from 0 to `count` - 1 exactly once.

    Args:
        parts: Samples of each part: int64, one-dimensional.
        count: Number of samples.

    Raises: AssertionError otherwise.

    Example:
        >>> check_cover([torch.tensor([0, 2]), torch.tensor([1])], count=3)
    """
    found = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
    values, times = found.unique(return_counts=True)
    twice = values[times > 1].tolist()
    assert not twice, f"in more than one place: samples {twice[:10]} of {count}"
    strange = values[(values < 0) | (values >= count)].tolist()
    assert not strange, f"no such samples: {strange[:10]} of {count}"
    lost = count - len(values)
    assert not lost, f"in no part: {lost} of {count} samples"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Check that the global random generators remain unchanged."""
    before = random.getstate(), torch.get_rng_state()
    yield
    assert random.getstate() == before[0], "Python's global random generator was changed"
    assert torch.equal(torch.get_rng_state(), before[1]), "torch's global random generator was changed"


def _held(divide: Divide, count: int, sizes: Sequence[float], seed: int) -> list[list[int]]:
    """Return the samples of each part; each rank computes the division itself, as in a real job."""
    return [list(divide(range(count), sizes, seed).use(rank)) for rank in range(len(sizes))]


def _divided(make: Make, dataset: Any, sizes: Sequence[float], seed: int) -> tuple[Indices, list[torch.Tensor]]:
    rule = make(dataset)
    order = rule.order(len(dataset), rule.shuffles, seed, 0, sizes)
    places = Resharding(order, rule.divide(order, sizes, seed), rule.interleaves).parts
    return order, [taken_from(part, 0, len(part)) for part in places]


def _check_balance(rule: Partitioner, samples: Indices, held: Sequence[torch.Tensor], shares: Sequence[float]) -> None:
    for bound in rule.bounds(samples, shares):
        for number, (part, least, most) in enumerate(zip(held, bound.least, bound.most, strict=True)):
            load = bound.load(part)
            assert least <= load <= most, f"part {number} has {bound.what} {load}, but {least} to {most} was stated"
    owners: dict[int, int] = {}
    for number, part in enumerate(held):
        together = rule.together(part)
        for group in () if together is None else together.unique().tolist():
            assert owners.setdefault(group, number) == number, f"group {group} is in parts {owners[group]} and {number}"
