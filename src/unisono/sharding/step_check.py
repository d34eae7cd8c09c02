"""Check before a step that all ranks are about to make the same one."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.communicator import Communicator
from unisono.errors import AbortedError, CommError, MismatchError

__all__ = ["check_same_step"]

_ADVICE = (
    "Average them before step(), by un.GradientAverager(model, comm), un.average_gradients(model, comm) or "
    "shard_gradients=True"
)


def check_same_step(
    names: Sequence[str],
    present: Sequence[bool],
    groups: Sequence[Mapping[str, Any]],
    gradients: Sequence[torch.Tensor],
    step: int,
    comm: Communicator,
    problem: Exception | None = None,
) -> None:
    """Raise on every rank if one has a problem, or ranks have other gradients or options. Collective.

    Cost: one all_gather of 8 bytes, and 3 us a gradient: one element of each is compared, another one in each step.

    Args:
        names: Names of all parameters.
        present: Whether each one has a gradient.
        groups: Groups of the optimizer.
        gradients: Gradients, in order, that should have the same bits on all ranks; empty if they differ by design.
        step: Number of the step.
        comm: The ranks that make it.
        problem: Error of this rank, which it raises; the others raise an `AbortedError` that names it.
    """
    try:
        if comm.size > 1:
            _compare(names, present, groups, gradients, step, comm, problem)
    except CommError:
        if problem is None:
            raise
    if problem is not None:
        raise problem


def _compare(
    names: Sequence[str],
    present: Sequence[bool],
    groups: Sequence[Mapping[str, Any]],
    gradients: Sequence[torch.Tensor],
    step: int,
    comm: Communicator,
    problem: Exception | None,
) -> None:
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    options = [_numbers(group) for group in groups]
    samples = _samples(gradients, step)
    checksum = zlib.crc32(repr((text, present, options, samples)).encode())
    found = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(found, torch.tensor([checksum], device=comm.device))
    if len(set(found.tolist())) == 1:
        return
    problems = comm.all_gather_object(text)
    for rank, theirs in enumerate(problems):
        if theirs is not None:
            raise AbortedError(
                f"rank {rank} failed in optimizer.step(), so no rank makes that step: {theirs}",
                rank=comm.rank,
                size=comm.size,
                peer=rank,
            )
    cards = comm.all_gather_object((list(present), options, samples))
    for rank, card in enumerate(cards):
        if card != cards[0]:
            raise MismatchError(
                f"ranks 0 and {rank} are about to make different steps: {_difference(names, cards[0], card, rank)}",
                rank=comm.rank,
                size=comm.size,
                peer=rank,
            )


def _numbers(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Options of a group that are numbers, as text."""
    found = []
    for key, value in sorted(group.items()):
        plain = value.tolist() if isinstance(value, torch.Tensor) else value
        if key != "params" and isinstance(plain, int | float | tuple | list):
            found.append((key, repr(plain)))
    return found


def _samples(gradients: Sequence[torch.Tensor], step: int) -> list[str]:
    """Return one element of each gradient as text, with all its digits."""
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in gradients:
        if grad.numel():
            element = grad[tuple(step * 7919 // (i + 1) % n for i, n in enumerate(grad.shape))]
            by_dtype.setdefault((grad.dtype, grad.device), []).append(element)
    return [repr(value) for elements in by_dtype.values() for value in torch.stack(elements).tolist()]


def _difference(names: Sequence[str], first: Any, other: Any, rank: int) -> str:
    for name, here, there in zip(names, first[0], other[0], strict=True):
        if here != there:
            return f"only rank {0 if here else rank} has a gradient of {name!r}"
    for number, (one, two) in enumerate(zip(first[1], other[1], strict=True)):
        if one != two:
            pairs = [(a, b) for a, b in zip(one, two, strict=False) if a != b]
            return f"the options of group {number} are {dict(a for a, _ in pairs)} and {dict(b for _, b in pairs)}"
    return f"their gradients differ. {_ADVICE}"
