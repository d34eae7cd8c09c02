"""Numbers of other libraries, generators and masks as arguments; and samplers that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler

import unisono as un
from unisono.data import GlobalBatchSampler, Partition, PartitionSampler, ShardPartition, StreamPartition
from unisono.testing import run_ranks

TWO = [np.int64(2), torch.tensor(2), np.uint8(2)]


@pytest.mark.parametrize("two", TWO)
def test_counts_of_any_integer_type(two: Any) -> None:
    assert un.data.gather_metrics(None, {"loss": 5.0}, count=two) == {"loss": 2.5}


@pytest.mark.parametrize("two", TWO)
@pytest.mark.parametrize(
    "make",
    [
        lambda: PartitionSampler(range(9)),
        lambda: GlobalBatchSampler(range(9), batch_size=2),
        lambda: StreamPartition(range(9)),
        lambda: ShardPartition(["a"], lambda name: range(9)),
    ],
)
def test_states_hold_plain_integers(make: Callable[[], Any], two: Any) -> None:
    states = []
    for number in (two, 2):
        share = make()
        share.set_epoch(number)
        rest = iter(share)
        for _ in range(4):
            next(rest)
        share.advance(number)
        states.append(repr(share.state_dict()))
        with pytest.raises(ValueError, match="cannot have"):
            share.advance(-1)
        with pytest.raises(TypeError, match="integer"):
            share.advance(0.5)
    assert states[0] == states[1]


@pytest.mark.parametrize("indices", [torch.tensor([True, False, True]), [0.5, 1.5], np.array([1.0])])
def test_masks_and_fractions_are_rejected_as_indices(indices: Any) -> None:
    with pytest.raises(TypeError, match="indices must be integers"):
        Partition("abc", indices)

    def program(comm: un.Communicator) -> None:
        mine = indices if comm.rank else [5]
        with pytest.raises(ValueError, match="rank 1 passed indices of"):
            un.data.gather_samples(comm, [0] * len(mine), mine)

    run_ranks(program, 2)


def test_generators_are_read_once() -> None:
    halves = (share for share in [0.5, 0.5])
    assert [list(part) for part in un.data.DataPartitioner(range(4), halves, partition="strided")] == [[0, 2], [1, 3]]
    weights: Any = (weight for weight in [1, 2])
    assert un.data.weighted(weights).settings() == {"weights": [1.0, 2.0]}


class Drawn(Sampler[int]):
    """Draws from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(2000):
            yield int(torch.randint(1000, (1,)))


def test_thread_ranks_draw_equal_numbers() -> None:
    def program(comm: un.Communicator) -> list[int]:
        sampler = PartitionSampler(range(1000), num_replicas=1, rank=0, partition=un.data.sampled(Drawn()))
        comm.barrier()
        return list(sampler)

    first, second, third = run_ranks(program, 3)
    assert first == second == third
