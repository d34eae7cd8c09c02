"""The references, layouts and strategies that other tests rely on are right themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.host.distribution import install_command
from unisono.testing import strategies
from unisono.testing.cases import CALLS, Case
from unisono.testing.check_case import Report, check_case, check_reports
from unisono.testing.memory_layouts import LAYOUTS, place
from unisono.testing.reference import DTYPES, ops_for, permuted, reduced


@pytest.mark.parametrize(
    ("dtype", "op", "columns", "wanted"),
    [
        (torch.float32, "sum", [[1, 2, 3]], [6]),
        (torch.float16, "avg", [[1, 2, 6]], [3]),
        (torch.float64, "product", [[2, 3, 7]], [42]),
        (torch.int8, "sum", [[100, 100, 0]], [-56]),
        (torch.int8, "product", [[16, 16, 3]], [0]),
        (torch.uint8, "min", [[0, 255, 7]], [0]),
        (torch.int64, "max", [[2**62, -(2**62), 5]], [2**62]),
        (torch.int16, "bxor", [[12, 10, 1]], [7]),
        (torch.bool, "sum", [[0, 1, 1], [0, 0, 0]], [1, 0]),
        (torch.bool, "band", [[1, 1, 1], [1, 0, 1]], [1, 0]),
        (torch.complex64, "product", [[1j, 1j, 2]], [-2]),
    ],
)
def test_reductions(dtype: torch.dtype, op: str, columns: list[list[complex]], wanted: list[complex]) -> None:
    tensors = [torch.tensor(row, dtype=dtype) for row in zip(*columns, strict=True)]
    expected = reduced(tensors, op)
    assert expected.value.to(dtype).tolist() == torch.tensor(wanted, dtype=dtype).tolist()
    assert not expected.complaint(torch.tensor(wanted, dtype=dtype))
    assert expected.complaint(torch.tensor(wanted, dtype=dtype).logical_not().to(dtype))


def test_nan_is_kept_and_expected() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    for op in ("min", "max", "sum"):
        expected = reduced([nan, torch.tensor([2.0, 2.0])], op)
        assert "not nan" in expected.complaint(torch.tensor([2.0, expected.value[1].item()]))
        assert not expected.complaint(torch.tensor([torch.nan, expected.value[1].item()]))
    assert "is nan" in reduced([torch.ones(1)], "max").complaint(torch.tensor([torch.nan]))


def test_integers_have_no_tolerance_and_floats_a_small_one() -> None:
    whole, parts = torch.tensor([3.0]), torch.tensor([0.1])
    assert reduced([whole] * 4, "sum").complaint(torch.tensor([12.000001]))
    assert not reduced([parts] * 4, "sum").complaint(torch.tensor([0.40000004]))
    assert reduced([parts] * 4, "sum").complaint(torch.tensor([0.40001]))
    # Half precision cannot hold all whole numbers.
    large = torch.tensor([2000.0], dtype=torch.float16)
    assert not reduced([large, large + 1], "sum").complaint(torch.tensor([4002.0], dtype=torch.float16))


def test_moved_data_is_compared_bitwise() -> None:
    zeros = torch.tensor([0.0, torch.nan])
    assert not permuted(zeros).complaint(zeros.clone())
    assert permuted(zeros).complaint(torch.tensor([-0.0, torch.nan]))
    assert permuted(zeros).complaint(torch.tensor([0.0, -torch.nan]))
    assert permuted(zeros).complaint(torch.zeros(3)) == "there are 3 elements, not 2"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_laid_out_tensor_detects_writes_outside(layout: str, dtype: torch.dtype) -> None:
    for count in (0, 1, 7, 12):
        values = torch.arange(count).remainder(2).to(dtype)
        placed = place(values, layout)
        assert torch.equal(placed.values(), values)
        placed.view.copy_(placed.view.logical_not())
        assert not placed.guard_bytes()
        around = set(range(placed.whole.numel())) - inside(placed.view)
        for index in around:
            placed = place(values, layout)
            placed.whole[index] = placed.whole[index].logical_not()
            assert placed.guard_bytes(), f"element {index} of {placed.whole.numel()}"


def inside(view: torch.Tensor) -> set[int]:
    whole = torch.arange(1000).as_strided(view.shape, view.stride(), view.storage_offset())
    return set(whole.reshape(-1).tolist())


def test_layouts_differ() -> None:
    views = {layout: place(torch.ones(12), layout).view for layout in LAYOUTS}
    assert not views["every second"].is_contiguous()
    assert not views["transposed"].is_contiguous()
    assert views["offset"].storage_offset() > 0
    assert place(torch.ones(1), "no dimensions").view.dim() == 0
    assert place(torch.ones(2, dtype=torch.complex64), "conjugate").view.is_conj()
    with pytest.raises(ValueError, match="unknown layout 'sideways'; known: contiguous"):
        place(torch.ones(1), "sideways")


def test_reports_of_ranks_are_compared() -> None:
    case = Case("all_reduce", 2, 3)
    check_reports(case, [Report((), "a"), Report((), "a")])
    with pytest.raises(AssertionError, match="ranks hold 2 different results"):
        check_reports(case, [Report((), "a"), Report((), "b")])
    with pytest.raises(AssertionError, match="rank 1: it is wrong"):
        check_reports(case, [Report((), "a"), Report(("rank 1: it is wrong",), "a")])


def test_wrong_result_is_reported() -> None:
    class Wrong:
        """A communicator whose all_gather spoils its input, and writes outside of a strided output."""

        rank, size, device = 0, 1, torch.device("cpu")

        def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, **how: object) -> None:
            tensor.zero_()
            tensor_list[0].as_strided((8,), (1,)).fill_(3)

    # It has what this check uses of a communicator.
    report = check_case(Wrong(), Case("all_gather", 1, 4, layout="every second"))  # type: ignore[arg-type]
    said = " ".join(report.complaints)
    assert "result 0: element 0 of 4 is 3.0" in said
    assert "input 0 has changed" in said
    assert "memory around result 0 has changed" in said
    assert "memory around input" not in said


@given(data=st.data())
def test_strategies_draw_consistent_values(data: st.DataObject) -> None:
    size = data.draw(strategies.worlds(5))
    case = data.draw(strategies.cases(size))
    assert case.call in CALLS
    assert case.op in ops_for(case.dtype)
    assert 0 <= case.root < size
    given_by_all = case.given()
    assert len(given_by_all) == size
    for rank in range(size):
        lengths = [expected.value.numel() for expected in case.expected(rank, given_by_all)]
        # A rank that only contributes in place keeps its own tensor.
        kept = case.what.in_place and not case.what.receives(rank, case.root)
        assert lengths == ([case.lengths()[rank][rank]] if kept else list(case.taken_lengths(rank)))
    parts = data.draw(strategies.parts(size))
    assert sorted(rank for part in parts for rank in part) == list(range(size))
    assert all(parts)
    total = data.draw(st.integers(0, 20))
    split = data.draw(strategies.splits(size, total))
    assert (len(split), sum(split), min(split) >= 0) == (size, total, True)


@given(data=st.data())
def test_drawn_tensors_are_as_requested(data: st.DataObject) -> None:
    dtype, size, count = data.draw(strategies.dtypes()), data.draw(strategies.worlds(3)), data.draw(st.integers(0, 4))
    tensors = data.draw(strategies.tensors_per_rank(size, dtype, count))
    assert [(t.dtype, t.shape) for t in tensors] == [(dtype, (count,))] * size


@pytest.mark.soak
def test_missing_extra_is_a_short_error() -> None:
    program = "import sys; sys.modules['hypothesis'] = None; import unisono as un; un.testing.strategies"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert f"UnavailableError: strategies need Hypothesis: {install_command('testing')}" in done.stderr


def test_package_exports_everything() -> None:
    assert {name for name in un.testing.__all__ if not hasattr(un.testing, name)} == set()
    assert set(un.testing.__all__) <= set(dir(un.testing))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        un.testing.nothing  # noqa: B018
