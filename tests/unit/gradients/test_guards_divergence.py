"""The divergence guard sees every bit, names the parameter and the rank, and says nothing without need."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.comm.equal_tensors import tensor_hash
from unisono.errors import MismatchError
from unisono.gradients.guards import DivergenceGuard
from unisono.gradients.periodic import every
from unisono.testing import run_ranks
from unisono.testing.memory_layouts import LAYOUTS, place
from unisono.testing.reference import DTYPES

ANY = [*DTYPES, torch.complex128, torch.float8_e4m3fn]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def some(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits at all, NaNs among them."""
    source = torch.Generator().manual_seed(seed)
    given = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=source)
    return (given & 1 if dtype == torch.bool else given).view(dtype)


@given(st.sampled_from(ANY), st.integers(1, 40), st.data())
def test_hash_depends_on_each_bit(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    tensor = some(count, dtype)
    byte = data.draw(st.integers(0, tensor.nbytes - 1))
    bit = 0 if dtype == torch.bool else data.draw(st.integers(0, 7))
    other = tensor.clone()
    bits(other)[byte] ^= 1 << bit
    assert tensor_hash(tensor) == tensor_hash(tensor.clone())
    assert tensor_hash(tensor) != tensor_hash(other)


@given(st.integers(3, 50), st.data())
def test_hash_depends_on_positions_and_pairs(count: int, data: st.DataObject) -> None:
    tensor = torch.arange(1.0, count + 1, dtype=torch.float64)
    i, j = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2)))
    swapped, negative = tensor.clone(), tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    negative[i] *= -1
    negative[j] *= -1
    assert len({int(tensor_hash(t)) for t in (tensor, swapped, negative, -negative, -tensor)}) == 5


@pytest.mark.parametrize("count", [65535, 65536, 65537, 200_000])
def test_hash_of_long_tensors(count: int) -> None:
    tensor = some(count, torch.int32)
    found = {int(tensor_hash(tensor))}
    for place_of in (0, count // 2, count - 1):
        other = tensor.clone()
        other[place_of] ^= 1
        found.add(int(tensor_hash(other)))
    # Chunks have places too: one word moved on by a chunk is another tensor.
    places = {0, 65536} & set(range(count))
    for place_of in places:
        lonely = torch.zeros(count, dtype=torch.int32)
        lonely[place_of] = 5
        found.add(int(tensor_hash(lonely)))
    assert len(found) == 4 + len(places)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 6, 24])
def test_hash_is_independent_of_memory_layout(layout: str, count: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        values = torch.arange(1, count + 1).to(dtype)
        assert tensor_hash(place(values, layout).view) == tensor_hash(values)


def test_equal_bits_are_equal_and_zeros_are_not() -> None:
    nan = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert tensor_hash(nan) == tensor_hash(nan.clone())
    assert tensor_hash(nan[:1]) != tensor_hash(nan[1:])
    assert tensor_hash(torch.tensor([0.0])) != tensor_hash(torch.tensor([-0.0]))


def model(seed: int = 0) -> torch.nn.Module:
    found = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source))
    return found


@pytest.mark.parametrize("backend", ["thread", pytest.param("gloo", marks=pytest.mark.soak)])
def test_flipped_bit_is_reported_on_every_rank(backend: str) -> None:
    def program(comm: un.Communicator) -> list[str]:
        found = model()
        guard, told = DivergenceGuard(found, comm, every=2), []
        for step in range(1, 7):
            if step == 3 and comm.rank == 1:
                found[0].bias.detach().view(torch.int32)[2] ^= 1
            try:
                guard.step()
            except MismatchError as error:
                told.append(str(error))
                un.broadcast_parameters(found, comm)
        return told

    ranks = un.testing.pool(backend).run(program, size=3)
    for rank, told in enumerate(ranks):
        assert len(told) == 1, "once, and not again after it was mended"
        assert re.match(
            rf"rank {rank} of 3: parameters differ between ranks after step 4: '0.bias': rank 1 differs from "
            r"ranks 0, 2 \(by up to \d(\.\d+)?e-0\d\)\. un\.broadcast_parameters",
            told[0],
        ), told[0]


def complaint(comm: un.Communicator, given: torch.nn.Module | list[torch.Tensor]) -> str:
    with pytest.raises(MismatchError) as caught:
        DivergenceGuard(given, comm).check()
    assert (caught.value.rank, caught.value.size) == (comm.rank, comm.size)
    return caught.value.message


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([1.0, 1.0, 3.0, 1.0], "rank 2 differs from ranks 0, 1, 3 (by up to 2)"),
        ([2.0, 1.0, 1.0, 1.0], "rank 0 differs from ranks 1, 2, 3 (by up to 1)"),
        ([1.0, 2.0, 1.0, 4.0], "ranks 1, 3 differ from ranks 0, 2 (by up to 3)"),
        ([1.0, 2.0, 1.0, 2.0], "ranks 1, 3 differ from ranks 0, 2 (by up to 1)"),
        ([1.0, 1.5], "rank 1 differs from rank 0 (by up to 0.5)"),
        ([0.0, -0.0, 0.0], "rank 1 differs from ranks 0, 2 (equal as numbers, in other bits)"),
        ([0.0, 0.0, float("nan")], "rank 2 differs from ranks 0, 1 (by up to nan)"),
    ],
)
def test_differing_ranks(held: list[float], said: str) -> None:
    def program(comm: un.Communicator) -> str:
        return complaint(comm, [torch.ones(2), torch.tensor([5.0, held[comm.rank]])])

    for found in run_ranks(program, len(held)):
        assert f"parameters differ between ranks: 'parameter 1': {said}. " in found


@pytest.mark.parametrize("dtype", ANY)
def test_any_dtype(dtype: torch.dtype) -> None:
    def program(comm: un.Communicator) -> str:
        same = [some(3, dtype)]
        un.checkpoint.assert_in_sync(same, comm)
        other = [torch.tensor([0, comm.rank]).to(dtype)]
        return complaint(comm, other)

    for found in run_ranks(program, 2):
        assert "'parameter 0': rank 1 differs from rank 0 (by up to 1)" in found


def test_many_differences_are_counted() -> None:
    def program(comm: un.Communicator) -> str:
        return complaint(comm, [torch.full((2,), float(comm.rank)) for _ in range(10)])

    found = run_ranks(program, 2)[0]
    assert found.count("rank 1 differs from rank 0") == 4
    assert "; and 6 more, the last of them 'parameter 9'" in found


def test_buffers_are_checked_on_request() -> None:
    def program(comm: un.Communicator) -> None:
        found = model()
        found[1].running_mean += comm.rank
        DivergenceGuard(found, comm).check()
        with pytest.raises(MismatchError, match=r"'1\.running_mean': rank 1 differs from rank 0 \(by up to 1\)"):
            un.checkpoint.assert_in_sync(found, comm)
        with pytest.raises(MismatchError, match=r"'1\.running_mean'"):
            DivergenceGuard(found, comm, buffers=True).check()

    run_ranks(program, 2)


def test_checks_by_schedule_and_by_hook() -> None:
    def program(comm: un.Communicator) -> tuple[list[bool], int]:
        weight = torch.zeros(2, requires_grad=True)
        weight.grad = torch.full((2,), float(comm.rank))
        guard = DivergenceGuard([weight], comm, every=every(3, warmup=1))
        due = [guard.step() for _ in range(4)]
        optimizer = torch.optim.SGD([weight], lr=1.0)
        guard.attach(optimizer)
        optimizer.step()
        optimizer.step()
        with pytest.raises(MismatchError, match="after step 7"):
            optimizer.step()
        return due, guard.steps

    assert run_ranks(program, 2) == [([True, False, False, True], 7)] * 2


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_models_pass(size: int) -> None:
    def program(comm: un.Communicator) -> None:
        found = model()
        with DivergenceGuard(found, comm, every=1, buffers=True) as guard:
            for _ in range(3):
                assert guard.step()
        un.checkpoint.assert_in_sync(found, comm)
        un.checkpoint.assert_in_sync(torch.nn.ReLU(), comm)

    run_ranks(program, size)


def test_models_with_different_shapes_are_named() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=r"'weight': rank 1 differs from rank 0 \(float32 \[2, 3\].* on rank 0"):
            un.checkpoint.assert_in_sync(torch.nn.Linear(3, 2 + comm.rank), comm)
        with pytest.raises(MismatchError, match=r"'parameters of DivergenceGuard', at \['bias'\]"):
            DivergenceGuard(torch.nn.Linear(3, 2 + comm.rank), comm)
        with pytest.raises(ValueError, match="at least 1 step"):
            DivergenceGuard(torch.nn.Linear(3, 2), comm, every=0)

    run_ranks(program, 2)


def test_a_guard_moves_to_other_ranks() -> None:
    def program(comm: un.Communicator) -> str:
        model = torch.nn.Linear(2, 1)
        un.broadcast_parameters(model, comm)
        guard = DivergenceGuard(model, comm, every=1)
        guard.step()
        guard.move_to(comm.split(comm.rank // 2))
        model.bias.data += comm.rank // 2
        guard.step()
        model.bias.data += comm.rank
        with pytest.raises(MismatchError) as error:
            guard.step()
        return str(error.value)

    said = run_ranks(program, 4)
    assert all("after step 3: 'bias': rank 1 differs from rank 0" in each for each in said)
