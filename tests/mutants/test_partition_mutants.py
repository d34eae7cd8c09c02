"""Partitioners that are known to be wrong, each killed by the checks that the right one passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from unisono.data import DataPartitioner, Partition
from unisono.testing.partitioners import check_division, check_seed


class Mutant(DataPartitioner[int]):
    """Right, until a subclass overwrites the parts."""

    def __init__(self, data: Sequence[int], sizes: Sequence[float], seed: int) -> None:
        super().__init__(data, sizes, seed)
        self.sizes, self.seed = sizes, seed
        self.order = torch.cat(self.partitions)
        self.partitions = tuple(self.parts())

    def parts(self) -> Sequence[torch.Tensor]:
        return self.partitions


class LosesTheRemainder(Mutant):
    """As the tutorial does."""

    def parts(self) -> list[torch.Tensor]:
        lengths = [int(size * len(self.order)) for size in self.sizes]
        return [self.order[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]


class GivesTheRemainderToTheLast(Mutant):
    def parts(self) -> list[torch.Tensor]:
        lengths = [int(size * len(self.order)) for size in self.sizes[:-1]]
        return list(self.order.split([*lengths, len(self.order) - sum(lengths)]))


class Overlaps(Mutant):
    """Bounds rounded outwards."""

    def parts(self) -> list[torch.Tensor]:
        bounds = [sum(self.sizes[:i]) * len(self.order) for i in range(len(self.sizes) + 1)]
        return [self.order[int(start) : -int(-stop // 1)] for start, stop in pairwise(bounds)]


class DrawsWithReplacement(Mutant):
    def parts(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(len(self.order), part.shape, generator=generator) for part in self.partitions]


class ShufflesPerRank(Mutant):
    def use(self, rank: int) -> Partition[int]:
        parts = DataPartitioner(self.data, self.sizes, self.seed + rank)
        return parts.use(rank)


class ShufflesGlobally(Mutant):
    """Right, but every draw of the program after it is another one."""

    def parts(self) -> Sequence[torch.Tensor]:
        random.seed(self.seed)
        return self.partitions


class ShufflesByChance(Mutant):
    """Never the same twice."""

    def parts(self) -> Sequence[torch.Tensor]:
        chance = random.SystemRandom()
        order = self.order[chance.sample(range(len(self.order)), len(self.order))]
        return order.split([len(part) for part in self.partitions])


class IgnoresTheSeed(Mutant):
    def parts(self) -> Sequence[torch.Tensor]:
        return DataPartitioner(self.data, self.sizes, seed=0).partitions


class DoesNotShuffle(Mutant):
    def parts(self) -> Sequence[torch.Tensor]:
        return torch.arange(len(self.order)).split([len(part) for part in self.partitions])


def test_base_of_all_mutants_is_correct() -> None:
    check_division(Mutant, 100, [1 / 3, 1 / 3, 1 / 3], seed=1)
    check_seed(Mutant)


@pytest.mark.parametrize("mutant", [LosesTheRemainder, Overlaps, DrawsWithReplacement, ShufflesPerRank])
def test_lossy_mutants_are_killed(mutant: type[Mutant]) -> None:
    with pytest.raises(AssertionError, match=r"in no part|more than one place"):
        check_division(mutant, 100, [1 / 3, 1 / 3, 1 / 3], seed=1)


def test_uneven_mutants_are_killed() -> None:
    with pytest.raises(AssertionError, match="part 6 has 5 of 11"):
        check_division(GivesTheRemainderToTheLast, 11, [1 / 7] * 7, seed=1)


def test_nondeterministic_mutants_are_killed() -> None:
    with pytest.raises(AssertionError):
        check_division(ShufflesByChance, 100, [0.5, 0.5], seed=1)


def test_mutants_that_change_global_state_are_killed() -> None:
    with pytest.raises(AssertionError, match="Python's global random generator was changed"):
        check_division(ShufflesGlobally, 100, [0.5, 0.5], seed=1)


@pytest.mark.parametrize(
    ("mutant", "said"), [(IgnoresTheSeed, "shuffle alike"), (DoesNotShuffle, "in their old order")]
)
def test_mutants_without_shuffling_are_killed(mutant: type[Mutant], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_seed(mutant)
