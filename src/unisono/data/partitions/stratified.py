"""Stratified: every part has the dataset's mix of labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch

from unisono.data.dataset_attributes import codes, digest, of_dataset
from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Indices
from unisono.data.partitioner import AssignmentPartitioner, Bound, apportion

__all__ = ["PARTITIONER", "Stratified"]


class Stratified(AssignmentPartitioner):
    """Parts that each have their share of every label.

    If this partitioner is chosen by name, the labels are the dataset's `targets` or `labels`.

    Args:
        labels: One label per sample: an integer tensor, or any hashable values.

    Raises:
        ValueError: `labels` is a tensor that is not one-dimensional.

    Balance: for each label, a part's number of samples differs from its share by less than one. A part's length differs
    from its share by less than one sample if all shares are equal, and by less than the number of labels otherwise.

    Example:
        >>> labels = ["cat"] * 8 + ["dog"] * 4
        >>> first, second = un.data.DataPartitioner(labels, [0.5, 0.5], partition=un.data.stratified(labels))
        >>> sorted(first) == sorted(second) == ["cat"] * 4 + ["dog"] * 2
        True
    """

    def __init__(self, labels: Iterable[Any]) -> None:
        super().__init__(codes(labels, "labels"), "labels")

    @classmethod
    def of(cls, dataset: Any) -> Self:
        return cls(of_dataset(dataset, ("targets", "labels"), "stratified"))

    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        labels = self._known[samples]
        parts = len(shares)
        shuffled = IndexShuffle(len(samples), seed).all()
        by_label = shuffled[labels[shuffled].argsort(stable=True)]
        owners = torch.empty_like(by_label)
        if len(set(shares)) == 1:
            # Assign samples to parts round-robin, and continue from one label to the next, so that the labels'
            # remainders even out.
            owners[by_label] = torch.arange(len(samples), device="cpu") % parts
        elif len(samples):
            counts = [count for label in labels.bincount().tolist() for count in apportion(label, shares)]
            numbers = torch.arange(parts, device="cpu").repeat(len(counts) // parts)
            owners[by_label] = numbers.repeat_interleave(torch.tensor(counts, device="cpu"))
        return owners

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        labels = self._known[samples.all()]
        counts = {label: count for label, count in enumerate(labels.bincount().tolist()) if count}
        slack = 1 if len(set(shares)) == 1 else len(counts)
        each = [
            Bound.around(f"label {label}", partial(self._count, label), count, shares, 1)
            for label, count in counts.items()
        ]
        return [Bound.around("samples", len, len(samples), shares, slack), *each]

    def fingerprint(self) -> str:
        return f"Stratified {digest(self._known)}"

    def _count(self, label: int, samples: torch.Tensor) -> float:
        return int((self._known[samples] == label).sum())


PARTITIONER = Stratified
