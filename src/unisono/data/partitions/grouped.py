"""Grouped: all samples of a group are in the same part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch

from unisono.data.dataset_attributes import codes, digest, of_dataset
from unisono.data.indices import Indices
from unisono.data.partitioner import AssignmentPartitioner, Bound
from unisono.data.partitions.balanced import largest_first

__all__ = ["PARTITIONER", "Grouped"]


class Grouped(AssignmentPartitioner):
    """Parts that never split a group, such as a patient or a video. If chosen by name, uses the dataset's `groups`.

    When a job resumes mid-epoch with a different number of ranks, the remaining samples of a group stay together.

    Args:
        groups: One group per sample: an integer tensor, or any hashable values.

    Raises:
        ValueError: `groups` is a tensor that is not one-dimensional.

    Balance: no part has more samples than share * (number of samples + (parts - 1) * size of the largest group). With
    equal shares, no part is more than 4/3 - 1/(3 * parts) times as large as the largest part of the best division (see
    `largest_first`).

    Example:
        >>> words = ["ant", "bee", "axe", "bat", "bow", "cup"]
        >>> parts = un.data.DataPartitioner(words, [0.5, 0.5], partition=un.data.grouped([word[0] for word in words]))
        >>> [sorted(part) for part in parts]
        [['bat', 'bee', 'bow'], ['ant', 'axe', 'cup']]
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(codes(groups, "groups"), "groups")

    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(of_dataset(dataset, ("groups",), "grouped"))

    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        present, members = self._known[samples].unique(return_inverse=True)
        return largest_first(members.bincount(minlength=len(present)), shares)[members]

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        groups = self._known[samples.all()]
        largest = int(groups.bincount().max()) if len(groups) else 0
        most = [share * (len(groups) + (len(shares) - 1) * largest) + 1e-6 for share in shares]
        return [Bound("samples", len, [0.0] * len(shares), most)]

    def together(self, samples: torch.Tensor) -> torch.Tensor | None:
        return self._known[samples]

    def fingerprint(self) -> str:
        return f"Grouped {digest(self._known)}"


PARTITIONER = Grouped
