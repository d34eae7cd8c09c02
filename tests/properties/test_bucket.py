"""A bucket: however gradients come, and in whatever chunks they are taken, it holds what each rank contributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.gradients import bucket as buckets
from unisono.gradients.bucket import BucketContents, GradientBucket
from unisono.gradients.caller_gradients import SavedGradients
from unisono.host.native import native

FORMS = ("plain", "turned", "negative", "spread", "sparse", "of a graph", "derived")


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
    """A tensor whose memory was replaced."""


def negated(values: torch.Tensor) -> torch.Tensor:
    """A view whose elements are the negative ones of its memory."""
    view: torch.Tensor = torch._neg_view(values)
    return view


def formed(values: torch.Tensor, form: str) -> torch.Tensor:
    """The same numbers in another form, some of which only torch can read."""
    match form:
        case "turned" if values.dim() == 2:
            return values.t().contiguous().t()
        case "negative":
            return negated(-values)
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
    core: Callable[[], Any] = native,
) -> None:
    """Two steps in one bucket; what comes are whole numbers, so every sum is exact."""
    parameters, coming = given

    memory = torch.full((GradientBucket.length(parameters),), torch.nan)
    with patch.object(buckets, "_CHUNK_BYTES", chunk):
        bucket = GradientBucket(range(len(parameters)), parameters, memory, scale)
    taken = [slot for slots in bucket.chunks[:-1] for slot in slots]
    assert taken == list(range(len(taken)))
    assert list(bucket.chunks[-1]) == list(range(len(parameters)))
    with patch.object(buckets, "native", core):
        for step in range(2):
            one_step(bucket, coming, scale, factor, forms, step)


def with_gradients(parameters: list[torch.nn.Parameter]) -> dict[int, torch.Tensor]:
    """Give every second parameter a gradient; by its slot."""
    grads = [torch.full_like(parameter, 7.0) for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return {2 * number + 1: grad for number, grad in enumerate(grads)}


def one_step(
    bucket: GradientBucket, coming: list[int], scale: float, factor: float, forms: tuple[str, ...], step: int
) -> None:
    parameters = bucket.parameters
    earlier = with_gradients(parameters[1::2]) if step else {}
    saved = SavedGradients(parameters, list(earlier.items()), set(), set())
    contents = BucketContents(bucket)
    sums = [torch.zeros_like(p) for p in parameters]
    of_graphs = set()
    for number, slot in enumerate(coming):
        parameter = parameters[slot]
        new = torch.arange(parameter.numel()).view(parameter.shape) + float(number + step)
        sums[slot] += new
        new = formed(new.contiguous(), forms[number % len(forms)])
        of_graphs.update({slot} if new.requires_grad else ())
        parameter.grad = new if parameter.grad is None else parameter.grad.to_dense() + new.to_dense()
        for slots in bucket.chunks[:-1]:
            if slot == slots[-1]:
                contents.take(slots)
    assert set(coming) >= {slot for slot, inside in enumerate(contents.inside) if inside}
    if step:
        # A reduction that came to nothing is made again.
        contents.finalize(set(coming), saved.aside, 3.0, True, (True, True, True), True)
        bucket.memory.fill_(torch.nan)
        assert contents.can_rewind()
        contents.rewind()
        sums = [total + earlier.get(slot, torch.zeros(())) for slot, total in enumerate(sums)]
    contents.finalize(set(coming), saved.aside, factor, flags=(False, step == 1, False))
    assert not contents.can_rewind()
    assert not contents.is_late()
    for view, total in zip(bucket.views, sums, strict=True):
        assert view.stride() == total.stride()
        assert torch.equal(view, total * (scale * factor))
    came = [slot in coming for slot in range(len(parameters))]
    asks = [0.0, scale * (step == 1), 0.0]
    assert contents.arrived == came
    assert bucket.header.tolist() == [*(scale * c for c in came), *(scale * (not c) for c in came), *asks]
    assert contents.read_header() == [(c, not c) for c in came]
    assert contents.asked == [False, step == 1, False]
    contents.found = contents.read_header()
    contents.assign_grads(saved)
    for slot, (parameter, view) in enumerate(zip(parameters, bucket.views, strict=True)):
        if slot in of_graphs:
            # What it was made of stays with it.
            assert parameter.grad is not None
            assert parameter.grad.requires_grad
            assert torch.equal(parameter.grad, view)
        else:
            assert parameter.grad is earlier.get(slot, view if came[slot] else None)
            if slot in earlier:
                assert torch.equal(earlier[slot], view if came[slot] else torch.full_like(view, 7.0))
    for parameter in parameters:
        parameter.grad = None


SAMPLES: Any = {
    "chunk": st.sampled_from([1, 30, 70, 1 << 20]),
    "scale": st.sampled_from([1.0, 0.5]),
    "factor": st.sampled_from([1.0, 0.25, 0.0]),
    "forms": st.one_of(st.just(("plain",)), st.lists(st.sampled_from(FORMS), min_size=1, max_size=5).map(tuple)),
    "core": st.sampled_from([native, native, lambda: None]),
}


@settings(max_examples=3 * settings.default.max_examples)
@given(given=arrivals(), **SAMPLES)
def test_bucket_holds_the_gradients(given: tuple[list[torch.nn.Parameter], list[int]], **sample: Any) -> None:
    law(given, **sample)


@pytest.mark.skipif(not hasattr(torch.ones(1), "grad_dtype"), reason="this torch gives gradients the parameter's dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradient_of_another_dtype_is_converted(dtype: torch.dtype) -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(6, dtype=torch.float16))
    parameter.grad_dtype = dtype
    parameter.grad = torch.arange(6, dtype=dtype)
    bucket = GradientBucket([0], [parameter], torch.zeros(GradientBucket.length([parameter]), dtype=torch.float16))
    BucketContents(bucket).take([0])
    assert bucket.views[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_gradient_already_in_the_bucket_is_not_copied() -> None:
    parameter = torch.nn.Parameter(torch.zeros(200_000))
    bucket = GradientBucket([0], [parameter], torch.zeros(GradientBucket.length([parameter])))
    bucket.views[0].copy_(torch.arange(200_000.0))
    parameter.grad = bucket.views[0]
    BucketContents(bucket).take([0])
    assert parameter.grad is None
    assert torch.equal(bucket.views[0], torch.arange(200_000.0))


def forgets_the_last(self: BucketContents, slots: Iterable[int]) -> None:
    original_take(self, slots)
    if len(list(slots)) > 1:
        self.bucket.views[list(slots)[-1]].zero_()


def overwrites(self: BucketContents, slots: Iterable[int]) -> None:
    for slot in slots:
        self.inside[slot] &= self.bucket.parameters[slot].grad is None
    original_take(self, slots)


def zeroes_nothing(
    self: BucketContents, came: set[int], earlier: dict[int, torch.Tensor], *given: Any, **also: Any
) -> None:
    with patch.object(torch.Tensor, "zero_", lambda tensor: tensor):
        original_fill(self, came, earlier, *given, **also)


def forgets_what_was_earlier(
    self: BucketContents, came: set[int], earlier: dict[int, torch.Tensor], *given: Any, **also: Any
) -> None:
    original_fill(self, came, {}, *given, **also)
    earlier.clear()


original_take, original_fill = BucketContents.take, BucketContents.finalize


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("take", forgets_the_last),
        ("take", overwrites),
        ("finalize", zeroes_nothing),
        ("finalize", forgets_what_was_earlier),
    ],
)
def test_faulty_bucket_is_detected(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketContents, name, mutant)

    # Of lengths in bytes 36, 8, 28, 32 and 12: the third is taken first, then its neighbours together; one never comes.
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (9, 2, 7, 8, 3)]
    with pytest.raises(AssertionError):
        law((parameters, [2, 1, 3, 0, 2]), 20, 0.5, 1.0)
