"""Means that tolerate bad contributions: trimmed mean, coordinate-wise median, and clipping to the median norm.

These means protect against a rank's bad contribution, such as noise or NaN, but not against a malicious rank, because
each rank computes a piece of the result for all ranks.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from unisono.communicator import Communicator
from unisono.compression.codec import accumulation_dtype

__all__ = ["ClippedMean", "TrimmedMean"]

_log = logging.getLogger("unisono")

_OUTLIER = 5.0
"""Multiple of the median rank's distance or norm beyond which a contribution is logged."""


@dataclass(frozen=True)
class TrimmedMean:
    """Mean of each coordinate without its `trim` largest and smallest values; NaN counts as the largest.

    Provisional: it may change in any minor version, without a deprecation.

    Rank 0 logs a warning on the logger "unisono" for each rank whose contribution is more than 5 times the median
    distance away from the result. Method: Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning
    (2018).

    Args:
        trim: Number of values dropped at each end, at least 1; None keeps only the one or two middle values, which
            gives the median.

    Cost: communicates as much as an all_reduce of the tensor, plus an all_reduce of 8 bytes per rank; sorts each
    coordinate. Memory: one more copy of the tensor.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([1.0, 2.0]) * (1000 if comm.rank == 3 else comm.rank)
        ...     un.gradients.TrimmedMean()(flat, comm)
        ...     return flat.tolist()
        >>> un.launch(program, 4, "thread")[0]
        [1.5, 3.0]
    """

    trim: int | None = 1

    def __post_init__(self) -> None:
        if self.trim is not None and self.trim < 1:
            raise ValueError(f"trim must be at least 1 value, or None for the median, not {self.trim}")

    def __call__(self, flat: torch.Tensor, comm: Communicator, turn: int = 0, /) -> None:
        """Replace a flat tensor with the result. Collective.

        Args:
            flat: A one-dimensional, contiguous tensor of a real or complex dtype. Real and imaginary parts are trimmed
                separately.
            comm: Communicator of the ranks whose tensors are averaged.
            turn: Ignored.

        Raises:
            ValueError: The number of ranks does not exceed twice `trim`; nothing was sent.
        """
        trim = (comm.size - 1) // 2 if self.trim is None else self.trim
        if comm.size <= 2 * trim:
            raise ValueError(f"a mean of {comm.size} ranks cannot drop {trim} at either end")
        values, rows = _pieces(flat, comm)
        piece = rows.sort(dim=0).values[trim : comm.size - trim].mean(0)
        distances = _norms(rows - piece, comm)
        for rank, times in _outliers(distances, comm):
            _log.warning("rank %d is %.3g times as far from the robust mean as the median rank", rank, times)
        _gather(piece, values, comm)


@dataclass(frozen=True)
class ClippedMean:
    """Mean of contributions whose norms are clipped to the median norm, separately for each message.

    Provisional: it may change in any minor version, without a deprecation.

    Non-finite contributions count as zeros. Rank 0 logs a warning on the logger "unisono" for each rank whose
    contribution has a norm that is not finite, or more than 5 times the median. Method: Karimireddy, He, Jaggi:
    Learning from history for Byzantine robust optimization (2021), with the median norm as the radius.

    Cost: communicates as much as an all_reduce of the tensor, plus an all_reduce of 8 bytes per rank. Memory: one more
    copy of the tensor.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([3.0, 4.0]) * (1000 if comm.rank == 1 else 1)
        ...     un.gradients.ClippedMean()(flat, comm)
        ...     return flat.tolist()
        >>> un.launch(program, 3, "thread")[0]
        [3.0, 4.0]
    """

    def __call__(self, flat: torch.Tensor, comm: Communicator, turn: int = 0, /) -> None:
        """Replace a flat tensor with the result. Collective.

        Args:
            flat: A one-dimensional, contiguous tensor of a real or complex dtype.
            comm: Communicator of the ranks whose tensors are averaged.
            turn: Ignored.
        """
        values, rows = _pieces(flat, comm)
        norms = _norms(rows, comm)
        for rank, times in _outliers(norms, comm):
            _log.warning("rank %d contributed %.3g times the median norm, and was clipped to it", rank, times)
        finite = norms.isfinite()
        if bool(finite.any()):
            factors = (norms[finite].median() / norms).clamp(max=1.0).nan_to_num(1.0)
            rows.mul_(factors.to(rows).unsqueeze(1))
        rows[~finite.to(rows.device)] = 0
        _gather(rows.mean(0), values, comm)


def _pieces(flat: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `flat` viewed as real numbers, and this rank's piece of each rank's tensor, of shape (ranks, elements)."""
    values = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    length = math.ceil(values.numel() / comm.size)
    given = functional.pad(values, (0, length * comm.size - values.numel()))
    arrived = torch.empty_like(given)
    comm.all_to_all_single(arrived, given)
    return values, arrived.view(comm.size, length).to(accumulation_dtype(values.dtype))


def _gather(piece: torch.Tensor, values: torch.Tensor, comm: Communicator) -> None:
    """Gather all ranks' pieces of the result into `values`."""
    result = values.new_empty(piece.numel() * comm.size)
    comm.all_gather_single(result, piece.to(values.dtype))
    values.copy_(result[: values.numel()])


def _norms(rows: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the norm of each row across all ranks' pieces, in float64 on the CPU."""
    squares = rows.double().square().sum(1).to(comm.device)
    comm.all_reduce(squares)
    return squares.sqrt().cpu()


def _outliers(norms: torch.Tensor, comm: Communicator) -> list[tuple[int, float]]:
    """On rank 0, return each rank with a norm far above the median norm, and the ratio of the two norms.

    A NaN norm counts as infinite. Other ranks get an empty list.
    """
    sizes = norms.nan_to_num(math.inf, math.inf)
    median = sizes.sort().values[(len(sizes) - 1) // 2]
    ratios = torch.where(sizes > 0, sizes / median, 0.0).tolist()
    return [(rank, ratio) for rank, ratio in enumerate(ratios) if ratio > _OUTLIER and comm.rank == 0]
