"""Robust means: their definitions, the log, and what one broken rank of five does to a training."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch
from pairwise import short

import unisono as un
from unisono.gradients import ClippedMean, DiLoCo, TrimmedMean
from unisono.testing import run_ranks

Robust = TrimmedMean | ClippedMean


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(robust: Robust, contributions: list[torch.Tensor]) -> torch.Tensor:
    """Reduce on as many ranks, which must hold the same bits."""

    def program(comm: un.Communicator) -> torch.Tensor:
        flat = contributions[comm.rank].clone()
        robust(flat, comm)
        return flat

    first, *others = run_ranks(program, len(contributions))
    for other in others:
        assert torch.equal(first, other)
    return first


@short(
    "size, trim, numel",
    [(*case, numel) for case in [(3, 1), (5, 1), (5, 2), (8, 3)] for numel in (0, 1, 7, 40)],
    [(3, 1, 0), (3, 1, 7), (5, 1, 1), (5, 2, 40), (8, 3, 1), (8, 3, 40)],
)
def test_trimmed_mean_drops_the_ends_of_each_coordinate(size: int, trim: int, numel: int) -> None:
    given = [contribution(rank, numel) for rank in range(size)]
    columns = [sorted(column)[trim : size - trim] for column in torch.stack(given).t().tolist()]
    wanted = torch.tensor([sum(column) / len(column) for column in columns], dtype=torch.float64)
    assert torch.allclose(reduced(TrimmedMean(trim), given), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_median_is_the_middle_value_or_the_mean_of_two(size: int) -> None:
    given = [contribution(rank, 9) for rank in range(size)]
    wanted = torch.stack(given).quantile(0.5, dim=0)
    assert torch.allclose(reduced(TrimmedMean(None), given), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_contributions_are_clipped_to_the_median_norm(dtype: torch.dtype) -> None:
    given = [contribution(rank, 23, dtype) * factor for rank, factor in enumerate((1, 3, 0.5, 40, 2))]
    norms = [float(g.double().norm()) for g in given]
    median = sorted(norms)[2]
    wanted = sum(g.double() * min(1.0, median / norm) for g, norm in zip(given, norms, strict=True)) / 5
    atol = {8: 1e-14, 4: 1e-6, 2: 1e-2}[dtype.itemsize]
    assert torch.allclose(reduced(ClippedMean(), given).double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("robust", [TrimmedMean(1), TrimmedMean(None), ClippedMean()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_rank_may_contribute_what_is_not_finite(robust: Robust, bad: float) -> None:
    given = [contribution(rank, 11) for rank in range(4)]
    given[2] = torch.full_like(given[2], bad)
    found = reduced(robust, given)
    assert found.isfinite().all()
    assert found.abs().max() <= max(g.abs().max() for rank, g in enumerate(given) if rank != 2)


def test_zeros_stay_zeros() -> None:
    for robust in (TrimmedMean(1), ClippedMean()):
        assert not reduced(robust, [torch.zeros(5)] * 3).any()
        # More than half of them: the median norm is zero, and so is what the others may weigh.
        assert not reduced(robust, [torch.zeros(5), torch.zeros(5), torch.ones(5)]).any()


def test_complex_numbers_are_reduced_by_their_parts() -> None:
    given = [torch.view_as_complex(contribution(rank, 12).view(6, 2)) for rank in range(3)]
    wanted = torch.stack([torch.view_as_real(g).flatten() for g in given]).quantile(0.5, dim=0)
    found = torch.view_as_real(reduced(TrimmedMean(None), given)).flatten()
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)


def test_too_few_ranks_to_trim_send_nothing() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match="a mean of 4 ranks cannot drop 2 at either end"):
            TrimmedMean(2)(torch.zeros(3), comm)
        comm.barrier()

    run_ranks(program, 4)
    with pytest.raises(ValueError, match="trim must be at least 1 value, or None"):
        TrimmedMean(0)


@pytest.mark.parametrize(
    ("robust", "said"),
    [
        (TrimmedMean(1), "rank 3 is 1[0-9][0-9] times as far from the robust mean"),
        (TrimmedMean(None), "rank 3 is 1[0-9][0-9] times as far from the robust mean"),
        (ClippedMean(), "rank 3 contributed 100 times the median norm, and was clipped"),
    ],
)
def test_log_names_the_outlier_and_nobody_else(robust: Robust, said: str, caplog: pytest.LogCaptureFixture) -> None:
    given = [contribution(9, 200) + contribution(rank, 200) for rank in range(5)]
    for rank in range(5):
        given[rank] *= given[0].norm() / given[rank].norm() * (100 if rank == 3 else 1)
    with caplog.at_level(logging.WARNING, logger="unisono"):
        reduced(robust, given)
    messages = [record.getMessage() for record in caplog.records if record.name == "unisono"]
    assert len(messages) == 1
    assert re.match(said, messages.pop())


# -- training --------------------------------------------------------------------------------------
POINTS = torch.randn(2000, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
LABELS = (POINTS @ torch.linspace(-1, 1, 10, dtype=torch.float64) + contribution(8, 2000) > 0).double()


def loss_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(POINTS @ weight, LABELS)


def trained(reduce: str, hostile: int | None, size: int = 5, rounds: int = 10) -> float:
    """Logistic regression by DiLoCo; one rank sends noise of 100 times the norm of what it has learnt."""

    def program(comm: un.Communicator) -> float:
        weight = torch.zeros(10, dtype=torch.float64, requires_grad=True)
        diloco = DiLoCo([weight], comm, 5, 0.7, 0.5, reduce=reduce)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        mine, labels = POINTS[comm.rank :: comm.size], LABELS[comm.rank :: comm.size]
        source = torch.Generator().manual_seed(comm.rank)
        for step in range(5 * rounds):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(mine @ weight, labels).backward()
            optimizer.step()
            if comm.rank == hostile and step % 5 == 4:
                with torch.no_grad():
                    noise = torch.randn(10, dtype=torch.float64, generator=source)
                    change = (diloco.anchor[0] - weight).norm()
                    weight.copy_(diloco.anchor[0] + noise / noise.norm() * 100 * change)
            diloco.step()
        return loss_of(weight.detach()).item()

    losses = run_ranks(program, size)
    assert losses == [losses[0]] * size
    return losses[0]


@pytest.fixture(scope="module")
def without() -> float:
    """Loss of five good ranks, by the plain mean."""
    return trained("mean", None)


@pytest.mark.parametrize("reduce", ["trimmed_mean", "median"])
def test_one_hostile_rank_of_five_does_not_spoil_the_loss(reduce: str, without: float) -> None:
    assert without < 0.45
    assert abs(trained(reduce, 3) - without) < 0.02 * without


def test_clipping_bounds_what_a_hostile_rank_does(without: float) -> None:
    assert abs(trained("clipped_mean", 3) - without) < 0.1 * without


def test_one_hostile_rank_of_five_spoils_the_plain_mean(without: float) -> None:
    assert trained("mean", 3) > 10 * without
