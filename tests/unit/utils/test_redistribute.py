"""Shards are cut for other ranks, from whatever ranks hold their elements."""

from __future__ import annotations

from random import Random

import pytest
import torch

import unisono as un
from unisono.checkpoint import TensorShard
from unisono.testing import run_ranks
from unisono.utils.redistribute import redistribute

SIZE = 3
DTYPES = [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int8]


def cuts(draw: Random, numel: int, parts: int) -> list[tuple[int, int]]:
    """Ranges that cover all elements, some of them empty."""
    ends = sorted(draw.randint(0, numel) for _ in range(parts - 1))
    return list(zip([0, *ends], [*ends, numel], strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_ranges_are_filled(seed: int) -> None:
    def program(comm: un.Communicator) -> None:
        draw = Random(seed)
        wholes = {
            ("part", i): torch.randint(0, 100, (draw.randint(0, 30),), generator=torch.Generator().manual_seed(i)).to(d)
            for i, d in enumerate(DTYPES)
        }
        held: dict[tuple[str, int], list[TensorShard]] = {}
        wanted = {}
        for key, whole in wholes.items():
            for start, stop in cuts(draw, len(whole), 5):
                # Some elements are on several ranks.
                if comm.rank in draw.sample(range(SIZE), draw.randint(1, SIZE)):
                    held.setdefault(key, []).append(TensorShard(whole[start:stop].clone(), start, whole.shape))
            start, stop = cuts(draw, len(whole), SIZE + 1)[comm.rank]
            if draw.random() < 0.8:
                wanted[key] = (start, stop, whole.shape, whole.dtype)
        found = redistribute(held, wanted, comm)
        assert found.keys() == wanted.keys()
        for key, shard in found.items():
            start, stop = wanted[key][:2]
            assert (shard.start, shard.stop, shard.shape) == (start, stop, wholes[key].shape)
            assert torch.equal(shard.local, wholes[key][start:stop])

    run_ranks(program, SIZE, "thread")


def test_elements_that_no_rank_has() -> None:
    def program(comm: un.Communicator) -> str:
        held = {"w": [TensorShard(torch.ones(2), 3 * comm.rank, [6])]}
        with pytest.raises(ValueError, match="no rank has element 2 of 'w'") as caught:
            redistribute(held, {"w": (1, 6, torch.Size([6]), torch.float32)} if comm.rank == 0 else {}, comm)
        return str(caught.value)

    assert len(set(run_ranks(program, 2, "thread"))) == 1
