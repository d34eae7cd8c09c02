"""Evaluation metrics over ranks with different numbers of samples, in which every sample counts exactly once."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from unisono.data.indices import are_integers
from unisono.errors import MismatchError

__all__ = ["gather_metrics", "gather_samples", "summed"]

# Unit of exact sums: every float64 is an integer multiple of 2^-1130.
_UNIT = 1130


def gather_metrics(
    comm: Any, metrics: Mapping[str, torch.Tensor | Sequence[float] | float], count: int | None = None
) -> dict[str, float]:
    """Return the mean of each metric over the samples of all ranks. Every rank gets the same result.

    Sums are computed exactly, and each mean is the float64 nearest to the true mean, so the result depends neither on
    the number of ranks nor on the distribution of samples over ranks.

    Collective over `comm`; ranks may have different numbers of samples, including none.

    Args:
        comm: A communicator; None if there is only one rank.
        metrics: Metrics by name. Each metric is a one-dimensional tensor or sequence with one number per sample of this
            rank, or a single number: the sum over this rank's `count` samples.
        count: This rank's number of samples, needed if any metric is a sum.

    Raises:
        ValueError: A sum was passed without `count`, or a tensor is not one-dimensional.
        MismatchError: Ranks passed metrics with different names.

    Returns:
        The means by name; they are nan if no rank has a sample.

    Cost: a single `all_gather_object`, with a few hundred bytes per metric.

    Example:
        >>> def program(comm):
        ...     losses = [[1.0, 2.0, 6.0], [], [3.0]][comm.rank]
        ...     return un.data.gather_metrics(comm, {"loss": losses, "right": torch.tensor(losses) < 2.5})
        >>> un.launch(program, nprocs=3, backend="thread")[1]
        {'loss': 3.0, 'right': 0.5}
    """
    mine = {name: summed(name, values, count) for name, values in metrics.items()}
    everyone = [mine] if comm is None else comm.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        if theirs.keys() != everyone[0].keys():
            raise MismatchError(
                f"rank 0 passed the metrics {sorted(everyone[0])}, rank {rank} {sorted(theirs)}; all ranks must "
                "pass the same, even those without samples"
            )
    return {name: _mean([theirs[name] for theirs in everyone]) for name in mine}


def gather_samples(comm: Any, outputs: Any, indices: Any, count: int | None = None, dst: int | None = None) -> Any:
    """Gather the per-sample results of all ranks, and sort them into the order of the dataset.

    Collective over `comm`; ranks may have different numbers of samples, including none.

    Args:
        comm: A communicator; None if there is only one rank.
        outputs: A tensor with this rank's samples along the first dimension, or a list of plain values.
        indices: The dataset index of each output: a list or a one-dimensional tensor.
        count: Number of samples in the dataset; if set, a missing sample is an error.
        dst: Rank that receives the result; if None, every rank receives it.

    Raises:
        ValueError: Raised on every rank: indices and outputs differ in number, indices are not integers, samples differ
            in shape, or a sample is duplicated or missing.

    Returns:
        A tensor on the CPU, or a list, with one entry per sample in ascending order of indices; None on ranks other
        than `dst`.

    Example:
        >>> def program(comm):
        ...     sampler = un.data.PartitionSampler(range(5), comm)
        ...     indices = list(sampler)
        ...     return un.data.gather_samples(comm, torch.tensor(indices) * 10, indices, count=5).tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [[0, 10, 20, 30, 40], [0, 10, 20, 30, 40]]
    """
    given = torch.as_tensor(indices).detach().to("cpu")
    # Send non-integer indices unchanged, so that every rank raises the error.
    positions = given.long() if not given.numel() or are_integers(given) else given
    local = outputs.detach().to("cpu") if isinstance(outputs, torch.Tensor) else list(outputs)
    if comm is None:
        everyone = [(positions, local)]
    elif dst is None:
        everyone = comm.all_gather_object((positions, local))
    else:
        # Send counts and indices to all ranks, not only to `dst`, so that every rank raises an error if they are
        # invalid.
        _check(comm.all_gather_object((positions, *_described(local))), count)
        everyone = comm.gather_object((positions, local), dst)
        if everyone is None:
            return None
    _check([(where, *_described(values)) for where, values in everyone], count)
    filled = [(where, values) for where, values in everyone if len(values)] or everyone[:1]
    order = torch.cat([where for where, _ in filled]).argsort()
    tensors = [values for _, values in filled if isinstance(values, torch.Tensor)]
    if len(tensors) == len(filled):
        return torch.cat(tensors)[order]
    joined = [value for _, values in filled for value in values]
    return [joined[position] for position in order.tolist()]


def _described(values: torch.Tensor | list[Any]) -> tuple[int, tuple[int, ...] | None]:
    """Return the number of samples (-1 for a zero-dimensional tensor) and, for tensors, the shape of a sample."""
    if not isinstance(values, torch.Tensor):
        return len(values), None
    return (len(values), tuple(values.shape[1:])) if values.dim() else (-1, ())


def _check(counts: Sequence[tuple[torch.Tensor, int, tuple[int, ...] | None]], count: int | None) -> None:
    shapes = {shape: rank for rank, (_, length, shape) in enumerate(counts) if length}
    if None not in shapes and len(shapes) > 1:
        by_rank = "; ".join(f"rank {rank}: {shape}" for shape, rank in shapes.items())
        raise ValueError(f"samples must have one shape on all ranks ({by_rank}); pass lists of tensors if they differ")
    for rank, (positions, length, _) in enumerate(counts):
        if positions.dim() != 1 or len(positions) != length:
            raise ValueError(f"rank {rank} passed {length} outputs for indices of shape {tuple(positions.shape)}")
        if not are_integers(positions):
            raise ValueError(f"rank {rank} passed indices of {positions.dtype}; indices must be integers")
    found, times = torch.cat([positions for positions, _, _ in counts]).unique(return_counts=True)
    if bool((times > 1).any()):
        twice = found[times > 1].tolist()
        raise ValueError(f"{len(twice)} samples were passed more than once, the first of them {twice[0]}")
    if count is not None and (len(found) != count or (count and (int(found[0]) < 0 or int(found[-1]) >= count))):
        raise ValueError(f"there must be {count} samples, 0 to {count - 1}, but ranks passed {len(found)}")


def summed(name: str, values: torch.Tensor | Sequence[float] | float, count: int | None) -> tuple[int, Any]:
    """Return the number of samples and their exact sum: a multiple of 2^-1130 in hexadecimal, or a non-finite value."""
    given = _exact(name, values)
    if given.dim() == 0:
        # Convert the count to a Python integer, because sums of numpy integers can overflow silently.
        many = -1 if count is None else operator.index(count)
        if many < 0:
            raise ValueError(f"{name!r} is a sum: pass count=..., the number of its samples")
        return many, _exact_sum(given.reshape(1))
    if given.dim() != 1:
        raise ValueError(f"{name!r} must be one number per sample, but has the shape {tuple(given.shape)}")
    return len(given), _exact_sum(given)


def _exact(name: str, values: torch.Tensor | Sequence[float] | float) -> torch.Tensor:
    """Convert values to float64 or integers without rounding."""
    given = torch.as_tensor(values)
    if given.is_complex():
        raise TypeError(f"{name!r} is {given.dtype}: a mean needs real numbers")
    if not given.is_floating_point():
        return given.detach().cpu()
    if not hasattr(values, "dtype"):
        # Convert Python numbers with an explicit dtype, because torch would otherwise round them to its default dtype.
        given = torch.as_tensor(values, dtype=torch.float64)
    return given.detach().to("cpu", torch.float64)


def _exact_sum(values: torch.Tensor) -> str | float:
    if not len(values):
        return "0x0"
    if not values.is_floating_point():
        return hex(sum(values.tolist()) << _UNIT)
    if not bool(values.isfinite().all()):
        return float(values[~values.isfinite()].sum())
    mantissas, exponents = torch.frexp(values)
    integers = (mantissas * 2.0**53).long()
    lowest = int(exponents.min())
    shifts = (exponents - lowest).long()
    # Sum the upper and lower halves of the integers separately, so that the sum of up to 2^36 values fits into an
    # int64.
    length = int(shifts.max()) + 1
    halves = (integers >> 27, integers & (1 << 27) - 1)
    high, low = (
        torch.zeros(length, dtype=torch.int64, device="cpu").index_add_(0, shifts, half).tolist() for half in halves
    )
    total = sum(((upper << 27) + lower) << shift for shift, (upper, lower) in enumerate(zip(high, low, strict=True)))
    return hex(total << (lowest - 53 + _UNIT))


def _mean(parts: Sequence[tuple[int, Any]]) -> float:
    count = sum(many for many, _ in parts)
    odd = [total for _, total in parts if isinstance(total, float)]
    if odd:
        return sum(odd)
    if not count:
        return math.nan
    return float(Fraction(sum(int(total, 16) for _, total in parts), count << _UNIT))
