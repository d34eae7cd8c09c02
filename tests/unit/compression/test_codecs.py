"""Each codec by itself: what it keeps, to the number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unisono as un
from unisono.compression import Codec
from unisono.testing import run_ranks

BLOCK = 1 << 16


def averages(make: Any, given: list[torch.Tensor], *shapes: tuple[int, ...], steps: int = 1) -> list[torch.Tensor]:
    """Return the averages of these inputs; of the last step if there are several."""

    def program(comm: un.Communicator) -> torch.Tensor:
        codec = un.compression.resolve(make)
        for _ in range(steps):
            flat = given[comm.rank].flatten().clone()
            codec.average(flat, comm, [torch.Size(shape) for shape in shapes or [flat.shape]])
        return flat

    return run_ranks(program, len(given))


def kept(codec: Codec, given: torch.Tensor) -> torch.Tensor:
    with un.init() as comm:
        found = torch.empty_like(given)
        codec.average(given.clone(), comm, [given.shape], found)
        return found


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_sum_is_exact(name: str) -> None:
    # 256 and 1 are exact in both, 257 is not: in a sum of halves, the ones of ranks 1 to 3 would be lost in bf16.
    given = [torch.tensor([1024.0]), *(torch.tensor([4.0]) for _ in range(3))]
    # Only these two have it.
    expected = torch.tensor(1036.0 / 4, dtype=un.compression.resolve(name).half).float()  # type: ignore[attr-defined]
    assert [got.item() for got in averages(name, given)] == [expected.item()] * 4


@pytest.mark.parametrize("size", [2, 5])
def test_fp16_does_not_overflow_in_the_sum(size: int) -> None:
    results = averages("fp16", [torch.tensor([60000.0, -60000.0])] * size)
    assert all((result.abs() - 60000).abs().max() < 64 for result in results)


def test_fp16_overflow_is_visible_on_all_ranks() -> None:
    results = averages("fp16", [torch.tensor([1e6, 1.0]), torch.tensor([0.0, 1.0])])
    assert [result.tolist() for result in results] == [[float("inf"), 1.0]] * 2


def test_int8_keeps_multiples_of_its_step() -> None:
    given = torch.randint(-127, 128, (3000,), generator=torch.Generator().manual_seed(0)).float()
    given[::100] = 127
    assert torch.equal(kept(un.compression.int8(), given * 0.5), given * 0.5)


def test_int4_keeps_multiples_of_its_step_and_bounds_the_rest() -> None:
    steps = torch.arange(-7.0, 8.0).repeat(3)
    assert torch.equal(kept(un.compression.int4(), steps * 0.5), steps * 0.5)
    given = torch.randn(999, generator=torch.Generator().manual_seed(0))
    codec = un.compression.int4(block=64)
    # 999 elements are 16 blocks of 64, the last one in part padding.
    for block, coded in zip(given.split(64), kept(codec, given).split(64), strict=True):
        assert (block - coded).abs().max() <= block.abs().max() / 14 * 1.001


def test_int8_blocks_are_independent() -> None:
    given = torch.cat((torch.full((64,), 1e6), torch.full((64,), 1e-6)))
    assert torch.allclose(kept(un.compression.int8(block=64), given), given)


def test_onebit_keeps_signs_and_means() -> None:
    given = torch.tensor([1.0, -3.0] * 32 + [10.0, -30.0] * 32)
    expected = torch.tensor([2.0, -2.0] * 32 + [20.0, -20.0] * 32)
    assert torch.equal(kept(un.compression.onebit(block=64), given), expected)


def test_onebit_sums_of_large_magnitudes_do_not_overflow() -> None:
    given = torch.full((1024,), 1e38)
    assert torch.allclose(kept(un.compression.onebit(), given), given)


def test_topk_finds_the_largest_of_each_block() -> None:
    # Three blocks of equal length, the last one short; places on both sides of 32768, in the first and last element.
    length = 2 * BLOCK + 18
    places = torch.tensor([0, 40000, 43696, 43697, 80000, 87393, 87394, 131089])
    given = torch.zeros(length).index_fill_(0, places, -4.0)
    given[::7] += 0.001
    results = averages(lambda: un.compression.topk(ratio=3 / BLOCK), [given, torch.zeros(length)])
    found = [result.nonzero().flatten() for result in results]
    assert torch.equal(found[0], found[1])
    assert set(places.tolist()) <= set(found[0].tolist())
    assert len(found[0]) <= 9
    assert torch.allclose(results[0][places], torch.tensor(-2.0), atol=0.01)


def test_topk_of_all_is_bfloat16() -> None:
    given = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept(un.compression.topk(ratio=1), given), given.bfloat16().float())


def test_topk_sends_nonfinite_values_first() -> None:
    given = torch.arange(100.0)
    given[[3, 50]] = torch.tensor([torch.nan, -torch.inf])
    found = kept(un.compression.topk(ratio=0.03), given)
    assert found[3].isnan()
    assert found[50] == -torch.inf
    assert found.nonzero().flatten().tolist() == [3, 50, 99]


def test_randomk_selects_every_index_equally_often() -> None:
    with un.init() as comm:
        codec, counts = un.compression.randomk(ratio=0.25, seed=3), torch.zeros(10)
        for _ in range(1000):
            flat = torch.ones(10)
            codec.average(flat, comm, [flat.shape])
            counts += flat
    # 3 of 10 places: 300 each, within five standard deviations.
    assert counts.sum() == 3000
    assert (counts - 300).abs().max() < 100
    assert counts.min() > 0


def test_randomk_seeds_differ() -> None:
    ones = torch.ones(400)
    drawn = {tuple(kept(un.compression.randomk(seed=seed, ratio=0.1), ones).tolist()) for seed in range(3)}
    assert len(drawn) == 3


def low_rank(seed: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(30, columns, generator=generator) @ torch.randn(columns, 20, generator=generator)


def test_powersgd_of_low_rank_is_exact() -> None:
    matrices = [low_rank(rank, 1) for rank in range(2)]
    vectors = [torch.arange(7.0) * (rank + 1) for rank in range(2)]
    given = [torch.cat((m.flatten(), v)) for m, v in zip(matrices, vectors, strict=True)]
    for result in averages(lambda: un.compression.powersgd(rank=2), given, (30, 4, 5), (7,)):
        assert torch.allclose(result, (given[0] + given[1]) / 2, atol=1e-5)


def test_powersgd_steps_are_a_power_iteration() -> None:
    matrix = low_rank(0, 5)
    values = torch.linalg.svdvals(matrix)
    best = values[2:].norm()
    distances = [
        (
            averages(lambda: un.compression.powersgd(rank=2), [matrix], (30, 20), steps=steps)[0] - matrix.flatten()
        ).norm()
        for steps in (1, 30)
    ]
    assert distances[1] < distances[0]
    assert distances[1] < best * 1.01


def test_powersgd_recovers_from_zero() -> None:
    matrix = low_rank(0, 1)
    # A Q of zeros, made orthonormal, looks at the first columns, and a P of zeros at the first rows: here is nothing.
    matrix[:10] = 0
    matrix[:, :10] = 0
    with un.init() as comm:
        codec, shapes = un.compression.powersgd(rank=2), [matrix.shape]
        codec.average(torch.zeros(600), comm, shapes)
        flat = matrix.flatten().clone()
        codec.average(flat, comm, shapes)
        assert torch.allclose(flat, matrix.flatten(), atol=1e-5)


def test_error_feedback_sends_the_earlier_residual() -> None:
    with un.init() as comm:
        codec = un.compression.error_feedback(un.compression.topk(ratio=0.25))
        first, second = torch.tensor([4.0, 3.0, 2.0, 0.0]), torch.zeros(4)
        for flat in (first, second):
            codec.average(flat, comm, [flat.shape])
    assert first.tolist() == [4.0, 0.0, 0.0, 0.0]
    assert second.tolist() == [0.0, 3.0, 0.0, 0.0]


def test_half_precision_residual_has_higher_precision() -> None:
    # In bfloat16, 1/1024 added to 256/1024 changes nothing.
    with un.init() as comm:
        codec = un.compression.error_feedback(un.compression.topk(ratio=0.5))
        for _ in range(600):
            flat = torch.tensor([1.0, 1 / 1024], dtype=torch.bfloat16)
            codec.average(flat, comm, [flat.shape])
    assert codec.state_dict()["residual"].tolist() == [0.0, 600 / 1024]
