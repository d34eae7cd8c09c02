"""A bucket: however gradients come, and in whatever chunks they are taken, it holds what each rank contributes."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compiled_kit import PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.gradients import bucket as buckets
from unisono.gradients import filling
from unisono.gradients.bucket import Bucket

FORMS = ("plain", "turned", "negative", "spread", "sparse", "of a graph", "derived")


def in_python() -> ModuleType:
    """The module of buckets made once more, with nothing compiled in it."""
    spec = spec_from_file_location("bucket_in_python", buckets.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with patch.object(filling, "Filling", PLAIN["Filling"]):
        spec.loader.exec_module(module)
    return module


IN_PYTHON = in_python()
MATRIX = torch.nn.Parameter(torch.ones(3, 5).t())


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[torch.nn.Parameter], list[int]]:
    """Parameters, one of them in another order of memory, and which one's gradient comes when: again, or never."""
    count = st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 33, 70, 20_000]))
    lengths = draw(st.lists(count, min_size=1, max_size=8))
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in lengths]
    if draw(st.booleans()):
        parameters.append(torch.nn.Parameter(MATRIX.detach().clone()))
    slots = list(range(len(parameters)))
    return parameters, draw(st.lists(st.sampled_from(slots), max_size=12)) + draw(st.permutations(slots))[1:]


class Derived(torch.Tensor):
    """A tensor that somebody made something else of."""


def formed(values: torch.Tensor, form: str) -> torch.Tensor:
    """The same numbers in another form, some of which only torch can read."""
    match form:
        case "turned" if values.dim() == 2:
            return values.t().contiguous().t()
        case "negative":
            negative: torch.Tensor = torch._neg_view(-values)
            return negative
        case "spread":
            return values.flatten().repeat_interleave(2)[::2].view(values.shape) if values.numel() else values
        case "sparse":
            return values.to_sparse()
        case "of a graph":
            return values.requires_grad_()
        case "derived":
            return values.as_subclass(Derived)
        case _:
            return values


def law(
    given: tuple[list[torch.nn.Parameter], list[int]],
    chunk: int,
    scale: float,
    factor: float,
    forms: tuple[str, ...] = ("plain",),
    module: Any = buckets,
    past: int = 0,
) -> None:
    """Two steps in one bucket; what comes are whole numbers, so every sum is exact."""
    parameters, coming = given

    def allocate(count: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.full((count,), torch.nan, dtype=dtype)

    with patch.object(module, "_CHUNK_BYTES", chunk), patch.object(module, "_PAST_BYTES", past):
        bucket = module.Bucket(range(len(parameters)), parameters, allocate, scale)
    for step in range(2):
        sums = [torch.zeros_like(p) for p in parameters]
        of_graphs = set()
        full = []
        for number, slot in enumerate(coming):
            parameter = parameters[slot]
            new = torch.arange(parameter.numel()).view(parameter.shape) + float(number + step)
            sums[slot] += new
            new = formed(new.contiguous(), forms[number % len(forms)])
            of_graphs.update({slot} if new.requires_grad else ())
            parameter.grad = new if parameter.grad is None else parameter.grad.to_dense() + new.to_dense()
            full.append(bucket.arrived(slot))
        earlier = {slot: torch.full_like(parameters[slot], 7.0) for slot in range(step, len(parameters), 2)}
        held = dict(earlier) if step else {}
        assert full == [set(coming[: i + 1]) == set(range(len(parameters))) for i in range(len(coming))]
        bucket.take_rest(held)
        assert not held
        if step:
            # A reduction that came to nothing is made again.
            bucket.fill(3.0, True, (True, True), True)
            bucket.memory.fill_(torch.nan)
            assert bucket.can_rewind()
            bucket.rewind()
            bucket.take_rest(held)
            sums = [total + earlier.get(slot, torch.zeros(())) for slot, total in enumerate(sums)]
        bucket.fill(factor, asks=(False, step == 1))
        assert not bucket.can_rewind()
        for view, total in zip(bucket.views, sums, strict=True):
            assert view.stride() == total.stride()
            assert torch.equal(view, total * (scale * factor))
        came = [slot in coming for slot in range(len(parameters))]
        asks = [0.0, scale * (step == 1)]
        assert bucket.words().tolist() == [*(scale * c for c in came), *(scale * (not c) for c in came), *asks]
        assert bucket.present() == [(c, not c) for c in came]
        assert bucket.asked == (False, step == 1)
        bucket.hand_out(bucket.present())
        for slot, (parameter, view) in enumerate(zip(parameters, bucket.views, strict=True)):
            if slot in of_graphs:
                # What it was made of stays with it.
                assert parameter.grad is not None
                assert parameter.grad.requires_grad
                assert torch.equal(parameter.grad, view)
            else:
                assert parameter.grad is (view if came[slot] or (step and slot in earlier) else None)
        bucket.begin()
        for parameter in parameters:
            parameter.grad = None


SAMPLES: Any = {
    "chunk": st.sampled_from([1, 30, 70, 1 << 20]),
    "scale": st.sampled_from([1.0, 0.5]),
    "factor": st.sampled_from([1.0, 0.25, 0.0]),
    "forms": st.one_of(st.just(("plain",)), st.lists(st.sampled_from(FORMS), min_size=1, max_size=5).map(tuple)),
    "module": st.sampled_from([buckets, buckets, IN_PYTHON]),
    "past": st.sampled_from([0, 1 << 20]),
}


@settings(max_examples=3 * settings.default.max_examples)
@given(given=arrivals(), **SAMPLES)
def test_a_bucket_holds_what_came(given: tuple[list[torch.nn.Parameter], list[int]], **sample: Any) -> None:
    law(given, **sample)


def forgets_the_last(self: Bucket, slots: list[int]) -> None:
    original_take(self, slots)
    if len(slots) > 1:
        self.views[slots[-1]].zero_()


def multiplies_what_is_between(self: Bucket, slots: list[int]) -> list[torch.Tensor]:
    return [self.flat[self._edges[min(slots)] : self._edges[max(slots) + 1]]]


def overwrites(self: Bucket, slot: int) -> None:
    self.take([slot])


def zeroes_nothing(self: Bucket, earlier: dict[int, torch.Tensor]) -> None:
    self.take([slot for slot, p in enumerate(self.parameters) if p.grad is not None and not self.inside[slot]])


original_take = Bucket.take_by_torch


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("take_by_torch", forgets_the_last),
        ("_run", multiplies_what_is_between),
        ("add", overwrites),
        ("take_rest", zeroes_nothing),
    ],
)
def test_a_faulty_bucket_is_noticed(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, name, mutant)

    # Of lengths in bytes 36, 8, 28, 32 and 12: the third is taken first, then its neighbours together; one never comes.
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (9, 2, 7, 8, 3)]
    with pytest.raises(AssertionError):
        law((parameters, [2, 1, 3, 0, 2]), 20, 0.5, 1.0)
