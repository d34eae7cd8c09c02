"""Checks for samplers that divide a dataset among ranks; a failed check raises `AssertionError`.

    check_ranks(partial(un.data.PartitionSampler, partition="grouped"), Samples(1000), ranks=3)

The checks create a separate sampler for each rank, as in a real job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.data import PartitionSampler
from unisono.testing.partitioners import check_cover

__all__ = ["MakeSampler", "check_epochs", "check_global_order", "check_ranks", "check_states"]

MakeSampler = Callable[..., PartitionSampler]
"""Function called like `PartitionSampler`, with a dataset, `num_replicas` and `rank`."""


def check_ranks(make: MakeSampler, dataset: Any, ranks: int) -> None:
    """Check that the ranks' samplers yield every sample once, have the right lengths, and can repeat an epoch's order.

    Args:
        make: Factory of a rank's sampler.
        dataset: A dataset whose sample i is the number i, such as `unisono.testing.partitioners.Samples`.
        ranks: Number of ranks.

    Raises: AssertionError otherwise.

    Example:
        >>> check_ranks(un.data.PartitionSampler, range(10), ranks=3)
    """
    samplers = [make(dataset, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    lengths = [len(sampler) for sampler in samplers]
    held = [list(sampler) for sampler in samplers]
    assert [len(part) for part in held] == lengths, f"ranks report {lengths}, but yield {[len(part) for part in held]}"
    check_cover([torch.tensor(part, dtype=torch.int64) for part in held], len(dataset))
    for sampler, part in zip(samplers, held, strict=True):
        sampler.set_epoch(0)
        assert list(sampler) == part, "the same epoch has another order"


def check_epochs(make: MakeSampler, dataset: Any) -> None:
    """Check that a different epoch or seed gives a different order, and that an epoch always has the same order.

    Args:
        make: Factory as in `check_ranks`, which must also accept the argument `seed`; the sampler must shuffle.
        dataset: Dataset as in `check_ranks`, with enough samples that two orders are never equal by chance.

    Raises: AssertionError otherwise.

    Example:
        >>> check_epochs(un.data.PartitionSampler, range(100))
    """
    sampler = make(dataset, num_replicas=1, rank=0)
    other = make(dataset, num_replicas=1, rank=0, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2], "epoch 0 has another order when it is repeated"
    assert orders[0] != orders[1], "epochs 0 and 1 have the same order"
    assert orders[0] != list(other), "seeds 0 and 1 have the same order"


def check_states(make: MakeSampler, dataset: Any, counts: Sequence[int], taken: Sequence[Sequence[float]]) -> None:
    """Check that samplers yield every sample once across saves and loads of their state, wherever each rank stops.

    Args:
        make, dataset: As in `check_ranks`.
        counts: Number of ranks in each phase.
        taken: In each phase but the last, the fraction (0 to 1) of its part that each rank consumes.

    Raises: AssertionError otherwise.

    Example:
        >>> check_states(un.data.PartitionSampler, range(10), counts=[2, 3], taken=[[0.5, 1.0]])
    """
    states: list[dict[str, Any]] = []
    committed: list[int] = []
    for number, parts in enumerate(counts):
        ranks = [make(dataset, num_replicas=parts, rank=rank) for rank in range(parts)]
        for sampler in ranks if states else ():
            sampler.load_state_dict(states)
        held = [list(sampler) for sampler in ranks]
        check_cover([torch.tensor(part, dtype=torch.int64) for part in [committed, *held]], len(dataset))
        for sampler, part, share in zip(ranks, held, [*taken, [0.0] * parts][number], strict=True):
            end = round(share * len(part))
            committed += part[:end]
            sampler.advance(end)
        states = [sampler.state_dict() for sampler in ranks]


def check_global_order(make: MakeSampler, dataset: Any, counts: Sequence[int], done: Sequence[int]) -> None:
    """Check that interleaved ranks follow one global order, even if the job resumes with a different number of ranks.

    Args:
        make: Factory as in `check_ranks`, for samplers whose partitioner assigns samples to ranks in turn
            (`Partitioner.interleaves`).
        dataset: Dataset as in `check_ranks`.
        counts: Number of ranks in each phase.
        done: Number of samples that all ranks together consume in each phase but the last.

    Raises: AssertionError otherwise.

    Example:
        >>> check_global_order(un.data.PartitionSampler, range(10), counts=[2, 3], done=[5])
    """
    whole = list(make(dataset, num_replicas=1, rank=0))
    states: list[dict[str, Any]] = []
    place = turn = before = 0
    for parts, count in zip(counts, [*done, len(whole)], strict=True):
        # Ranks take turns yielding items. If the number of ranks is unchanged, the next rank in turn yields the next
        # item; otherwise, rank 0 does.
        turn = turn if parts == before else 0
        ranks = [make(dataset, num_replicas=parts, rank=rank) for rank in range(parts)]
        for sampler in ranks if states else ():
            sampler.load_state_dict(states)
        given = [iter(sampler) for sampler in ranks]
        turns = [next(given[(turn + step) % parts], None) for step in range(len(whole) - place)]
        assert turns == whole[place:], f"from place {place} on {parts} ranks went through {turns}, not {whole[place:]}"
        for step in range(min(count, len(turns))):
            ranks[(turn + step) % parts].advance(1)
        states = [sampler.state_dict() for sampler in ranks]
        place = place + min(count, len(turns))
        turn = turn + min(count, len(turns))
        before = parts
