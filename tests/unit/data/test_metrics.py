"""Evaluation counts every sample once, and means do not depend on the number of ranks, to the last bit."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.data import PartitionSampler, gather_metrics, gather_samples
from unisono.errors import MismatchError
from unisono.testing import run_ranks

FINITE = st.floats(allow_nan=False, allow_infinity=False)


class Told:
    """A communicator whose ranks have said what they say."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def all_gather_object(self, mine: Any) -> list[Any]:
        return self.said


def over_ranks(parts: list[list[float]]) -> float:
    from unisono.data import metrics

    said = [{"it": metrics.summed("it", torch.tensor(part, dtype=torch.float64), None)} for part in parts]
    return gather_metrics(Told(said), {"it": parts[0]})["it"]


@given(values=st.lists(FINITE, min_size=1, max_size=40), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_mean_is_correctly_rounded_for_any_partition(values: list[float], cuts: list[int]) -> None:
    ends = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [values[start:stop] for start, stop in pairwise(ends)]
    assert over_ranks(parts) == float(sum(map(Fraction, values)) / len(values))


def test_nonfinite_values_propagate() -> None:
    assert math.isnan(over_ranks([[1.0, math.nan], [2.0]]))
    assert over_ranks([[1.0], [math.inf]]) == math.inf
    assert math.isnan(over_ranks([[-math.inf], [math.inf]]))
    assert math.isnan(over_ranks([[], []]))


def test_evaluation_of_uneven_parts() -> None:
    values = torch.rand(23, generator=torch.Generator().manual_seed(0))

    def evaluate(comm: un.Communicator) -> tuple[dict[str, float], list[float]]:
        indices = list(PartitionSampler(values, comm, shuffle=False))
        mine = values[indices]
        found = gather_metrics(comm, {"value": mine, "high": mine > 0.5, "sum": mine.double().sum()}, count=len(mine))
        return found, gather_samples(comm, mine, indices, count=23).tolist()

    alone = evaluate_alone(values)
    for size in (1, 2, 4):
        for found, gathered in run_ranks(evaluate, size):
            assert {name: found[name] for name in alone} == alone
            assert found["sum"] == pytest.approx(alone["value"], rel=1e-14)
            assert gathered == values.tolist()


def evaluate_alone(values: torch.Tensor) -> dict[str, float]:
    return gather_metrics(None, {"value": values, "high": values > 0.5})


def test_more_ranks_than_samples() -> None:
    def evaluate(comm: un.Communicator) -> tuple[dict[str, float], Any]:
        indices = list(PartitionSampler(range(2), comm))
        outputs = [f"sample {index}" for index in indices]
        ones = torch.ones(len(indices))
        return gather_metrics(comm, {"one": ones}), gather_samples(comm, outputs, indices, 2, dst=2)

    assert [found for found, _ in run_ranks(evaluate, 4)] == [{"one": 1.0}] * 4
    gathered = [outputs for _, outputs in run_ranks(evaluate, 4)]
    assert gathered == [None, None, ["sample 0", "sample 1"], None]


def test_rows_are_in_dataset_order() -> None:
    def evaluate(comm: un.Communicator) -> torch.Tensor:
        indices = list(PartitionSampler(range(5), comm, seed=4))
        rows = torch.tensor(indices, dtype=torch.float16).unsqueeze(1).expand(-1, 3)
        gathered: torch.Tensor = gather_samples(comm, rows, indices)
        return gathered

    for rows in run_ranks(evaluate, 2):
        assert rows.dtype == torch.float16
        assert rows.tolist() == [[float(i)] * 3 for i in range(5)]


def test_mismatched_rows_are_rejected_on_every_rank() -> None:
    def names(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=r"rank 0 passed the metrics \['a'\], rank 1 \['b'\]"):
            gather_metrics(comm, {"ab"[comm.rank]: torch.ones(1)})
        with pytest.raises(ValueError, match="1 samples were passed more than once, the first of them 7"):
            gather_samples(comm, torch.ones(1), [7])
        with pytest.raises(ValueError, match="3 samples, 0 to 2, but ranks passed 2"):
            gather_samples(comm, torch.ones(1), [comm.rank], count=3)
        with pytest.raises(ValueError, match="rank 1 passed 1 outputs for indices of shape"):
            gather_samples(comm, torch.ones(1), [0] * (1 + comm.rank), dst=0)
        for dst in (None, 0, 1):
            with pytest.raises(ValueError, match=r"one shape on all ranks \(rank 0: \(2,\); rank 1: \(3,\)\)"):
                gather_samples(comm, torch.ones(1, 2 + comm.rank), [comm.rank], dst=dst)
            with pytest.raises(ValueError, match="rank 1 passed -1 outputs for indices of shape"):
                gather_samples(comm, torch.ones(1) if comm.rank == 0 else torch.ones(()), [comm.rank], dst=dst)
        ragged = gather_samples(comm, [torch.ones(2 + comm.rank)], [comm.rank])
        assert [len(sample) for sample in ragged] == [2, 3]

    run_ranks(names, 2)
    with pytest.raises(ValueError, match="'a' is a sum: pass count"):
        gather_metrics(None, {"a": 3.0})
    with pytest.raises(ValueError, match="'a' must be one number per sample"):
        gather_metrics(None, {"a": torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("values", "count", "mean"),
    [
        ([0.1], None, 0.1),
        (0.1, 1, 0.1),
        ([16777217.0, 2**53 - 1], None, (16777217 + 2**53 - 1) / 2),
        ([1e300], None, 1e300),
        ([1e308, 1e308, -1e308], None, 1e308 / 3),
        ([2**60, 1 - 2**60], None, 0.5),
        (torch.tensor([2**62, 1 - 2**62]), None, 0.5),
        ([True, False], None, 0.5),
    ],
)
def test_plain_numbers_are_as_exact_as_tensors(values: Any, count: int | None, mean: float) -> None:
    assert gather_metrics(None, {"x": values}, count=count) == {"x": mean}


def test_complex_numbers_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"'x' is .*complex64"):
        gather_metrics(None, {"x": torch.ones(2, dtype=torch.complex64)})
