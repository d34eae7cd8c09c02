"""A bucket: however gradients come, and in whatever chunks they are taken, it holds what each rank contributes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.gradients import bucket as buckets
from unisono.gradients.bucket import Bucket

MATRIX = torch.nn.Parameter(torch.ones(3, 5).t())


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[torch.nn.Parameter], list[int]]:
    """Parameters, one of them in another order of memory, and which one's gradient comes when: again, or never."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in lengths]
    if draw(st.booleans()):
        parameters.append(torch.nn.Parameter(MATRIX.detach().clone()))
    slots = list(range(len(parameters)))
    return parameters, draw(st.lists(st.sampled_from(slots), max_size=12)) + draw(st.permutations(slots))[1:]


def law(given: tuple[list[torch.nn.Parameter], list[int]], chunk: int, scale: float, factor: float) -> None:
    """Two steps in one bucket; what comes are whole numbers, so every sum is exact."""
    parameters, coming = given

    def allocate(count: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.full((count,), torch.nan, dtype=dtype)

    bucket = Bucket(range(len(parameters)), parameters, allocate, scale)
    for step in range(2):
        sums = [torch.zeros_like(p) for p in parameters]
        full = []
        for number, slot in enumerate(coming):
            parameter = parameters[slot]
            new = torch.arange(parameter.numel()).view(parameter.shape) + float(number + step)
            sums[slot] += new
            parameter.grad = new if parameter.grad is None else parameter.grad + new
            with patch.object(buckets, "_CHUNK_BYTES", chunk):
                full.append(bucket.arrived(slot))
        assert full == [set(coming[: i + 1]) == set(range(len(parameters))) for i in range(len(coming))]
        bucket.fill(factor, number=step, asks=(False, step == 1))
        for view, total in zip(bucket.views, sums, strict=True):
            assert view.stride() == total.stride()
            assert torch.equal(view, total * (scale * factor))
        came = [slot in coming for slot in range(len(parameters))]
        marks = [*(scale * (place == step) for place in range(8)), 0.0, scale * (step == 1)]
        assert bucket.words().tolist() == [*(scale * c for c in came), *(scale * (not c) for c in came), *marks]
        assert bucket.present() == [(c, not c) for c in came]
        assert bucket.asked == (False, step == 1)
        bucket.hand_out(bucket.present())
        assert [p.grad is view for p, view in zip(parameters, bucket.views, strict=True)] == came
        bucket.begin()
        for parameter in parameters:
            parameter.grad = None


SAMPLES: Any = {
    "chunk": st.sampled_from([1, 30, 70, 1 << 20]),
    "scale": st.sampled_from([1.0, 0.5]),
    "factor": st.sampled_from([1.0, 0.25, 0.0]),
}


@given(given=arrivals(), **SAMPLES)
def test_a_bucket_holds_what_came(
    given: tuple[list[torch.nn.Parameter], list[int]], chunk: int, scale: float, factor: float
) -> None:
    law(given, chunk, scale, factor)


def forgets_the_last(self: Bucket, slots: list[int]) -> None:
    original_take(self, slots)
    if len(slots) > 1:
        self.views[slots[-1]].zero_()


def multiplies_what_is_between(self: Bucket, slots: list[int]) -> list[torch.Tensor]:
    return [self.flat[self._edges[min(slots)] : self._edges[max(slots) + 1]]]


def overwrites(self: Bucket, slot: int) -> None:
    self._take([slot])


def zeroes_nothing(self: Bucket) -> None:
    self._take([slot for slot, p in enumerate(self.parameters) if p.grad is not None and not self._inside[slot]])


original_take = Bucket._take


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_take", forgets_the_last),
        ("_run", multiplies_what_is_between),
        ("_add", overwrites),
        ("_take_rest", zeroes_nothing),
    ],
)
def test_a_faulty_bucket_is_noticed(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, name, mutant)

    # Of lengths in bytes 36, 8, 28, 32 and 12: the third is taken first, then its neighbours together; one never comes.
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (9, 2, 7, 8, 3)]
    with pytest.raises(AssertionError):
        law((parameters, [2, 1, 3, 0, 2]), 20, 0.5, 1.0)
