"""The native core gives what algorithms by messages give, bit for bit, whatever the bits are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from insides import engine_of
from native_core import without_core

import unisono as un
from unisono.core.tensors import check_reducible, parse_op
from unisono.host.native import native
from unisono.testing.pools import RankPool

pytestmark = pytest.mark.skipif(native() is None, reason="no compiler was here when unisono was installed")

RANKS = 5
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
TILE = 1 << 20
CALLS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"]
MOVES = ["broadcast", "gather", "scatter", "all_gather", "all_gather_single", "all_to_all", "all_to_all_single"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS, "shm", timeout=60) as pool:
        yield pool


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits: NaNs, infinities, denormals and zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    drawn = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    if dtype.is_floating_point:
        special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, 1e-310, 65504.0, 3e-8])
        chosen = special.to(dtype)[torch.randint(0, len(special), (count,), generator=generator)]
        drawn = torch.where(torch.rand(count, generator=generator) < 0.3, chosen, drawn)
    return drawn


def same(one: torch.Tensor, other: torch.Tensor, op: str) -> bool:
    """Return whether bits are equal, except inside NaNs, and signs of zeros where torch's depend on the position."""
    if one.is_complex():
        # At some positions torch multiplies an addend by 1 + 0j first, which makes NaNs beside an infinite part.
        finite = torch.isfinite(other)
        if not torch.equal(torch.isfinite(one), finite):
            return False
        if op == "product":
            # Torch rounds the last few elements of a tensor, beyond whole vectors, otherwise than the others.
            precision = 4 * torch.finfo(one.dtype).eps
            return torch.allclose(one[finite], other[finite], rtol=precision, atol=0.0)
        one, other = torch.view_as_real(one[finite]), torch.view_as_real(other[finite])
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not torch.equal(one.isnan(), other.isnan()):
        return False
    one, other = one.nan_to_num(1.0, posinf=None), other.nan_to_num(1.0, posinf=None)
    signs = op in ("min", "max") or torch.equal(one.signbit(), other.signbit())
    return signs and bool((one == other).all())


def called(comm: un.Communicator, call: str, op: str, counts: list[int], given: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a call on new tensors; `counts` holds an element count for each rank."""
    rank, size, count = comm.rank, comm.size, counts[0]
    root, mine = count % size, given[:count].clone()
    match call:
        case "all_reduce":
            comm.all_reduce(mine, op)
        case "reduce":
            comm.reduce(mine, root, op)
        case "reduce_scatter":
            uneven = [given[:n].clone() for n in counts[:size]]
            mine = torch.zeros_like(uneven[rank])
            comm.reduce_scatter(mine, uneven, op)
        case "reduce_scatter_single":
            comm.reduce_scatter_single(mine, given[: count * size].clone(), op)
        case _:
            return moved(comm, call, counts, given)
    return [mine]


def moved(comm: un.Communicator, call: str, counts: list[int], given: torch.Tensor) -> list[torch.Tensor]:
    """The same, of calls that reduce nothing."""
    rank, size, count = comm.rank, comm.size, counts[0]
    root, mine = count % size, given[:count].clone()
    parts = [part.clone() for part in given[: count * size].split(count)] if count else [mine] * size
    empty = [torch.zeros_like(mine) for _ in range(size)]
    match call:
        case "broadcast":
            comm.broadcast(mine, root)
        case "gather":
            comm.gather(mine, empty if rank == root else None, root)
        case "scatter":
            comm.scatter(mine, parts if rank == root else None, root)
        case "all_gather":
            empty = [torch.zeros_like(given[:n]) for n in counts[:size]]
            comm.all_gather(empty, given[: counts[rank]].clone())
        case "all_gather_single":
            whole = torch.zeros_like(given[: count * size])
            comm.all_gather_single(whole, mine)
            empty = [whole]
        case "all_to_all":
            parts = [given[: (counts[rank] + counts[r]) // 2].clone() for r in range(size)]
            empty = [torch.zeros_like(part) for part in parts]
            comm.all_to_all(empty, parts)
        case "all_to_all_single":
            whole = torch.zeros_like(given[: count * size])
            comm.all_to_all_single(whole, given[: count * size].clone())
            empty = [whole]
    return [mine, *empty]


def program(comm: un.Communicator, call: str, op: str, dtype: torch.dtype, counts: list[int], seed: int) -> list[bool]:
    given = random_bits(max(counts) * max(comm.size, 1), dtype, seed + comm.rank)
    with comm.dup() as fast, without_core(comm) as slow:
        assert engine_of(fast).fast_path is not None
        assert engine_of(slow).fast_path is None
        one, other = (called(part, call, op, counts, given) for part in (fast, slow))
        if call == "reduce" and comm.rank != counts[0] % comm.size:
            return [torch.equal(one[0].view(torch.uint8), given[: counts[0]].view(torch.uint8))]
    return [same(a, b, op) for a, b in zip(one, other, strict=True)]


def edges(width: int) -> st.SearchStrategy[int]:
    """Lengths around those at which something changes, and any short ones."""
    near = [n // width + d for n in (1 << 12, 1 << 16, 128 << 10, TILE // 3, TILE) for d in (-1, 0, 1)]
    return st.one_of(st.integers(0, 70), st.sampled_from(near))


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(data=st.data(), size=st.integers(2, RANKS), seed=st.integers(0, 99))
def test_core_reduces_like_the_general_path(ranks: RankPool, data: st.DataObject, size: int, seed: int) -> None:
    dtype = data.draw(st.sampled_from([torch.bool, *INTS, *FLOATS]))
    op = data.draw(st.sampled_from([op for op in OPS if reducible(op, dtype)]))
    call = data.draw(st.sampled_from(CALLS))
    counts = data.draw(st.lists(edges(dtype.itemsize), min_size=RANKS, max_size=RANKS))
    for found in ranks.run(program, call, op, dtype, counts, seed, size=size):
        assert all(found)


@settings(max_examples=settings.default.max_examples)
@given(data=st.data(), size=st.integers(2, RANKS), seed=st.integers(0, 99))
def test_core_moves_data_like_the_general_path(ranks: RankPool, data: st.DataObject, size: int, seed: int) -> None:
    call = data.draw(st.sampled_from(MOVES))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float32, torch.complex128]))
    counts = data.draw(st.lists(edges(dtype.itemsize), min_size=RANKS, max_size=RANKS))
    for found in ranks.run(program, call, "", dtype, counts, seed, size=size):
        assert all(found)


LONG = [
    # Of elements of four bytes: one that begins a second tile for each call, and all of them for one call.
    pytest.param(call, count, marks=() if call == "all_reduce" or count == TILE // 4 + 1 else pytest.mark.soak)
    for call in CALLS
    for count in (TILE // 8, TILE // 4, TILE // 4 + 1, 3 * TILE // 4 - 1)
]


@pytest.mark.parametrize(("call", "count"), LONG)
def test_long_messages_are_reduced_like_the_general_path(ranks: RankPool, call: str, count: int) -> None:
    for found in ranks.run(program, call, "sum", torch.float32, [count] * RANKS, 1, size=3):
        assert all(found)


def reducible(op: str, dtype: torch.dtype) -> bool:
    try:
        check_reducible(parse_op(op), dtype)
    except ValueError:
        return False
    return True


def apart(comm: un.Communicator) -> list[str]:
    """Return the errors of a call with wrong tensors, with the core and without its collectives."""
    whole = torch.zeros(4 * comm.size)
    wrong = [
        lambda c: c.all_gather_single(whole, whole[2:6]),
        lambda c: c.all_to_all([whole[:2]] * c.size, [torch.zeros(2)] * c.size),
        lambda c: c.all_gather_single(torch.zeros(5), torch.zeros(3)),
        lambda c: c.broadcast(whole, True),
        lambda c: c.broadcast(whole, 9),
        lambda c: c.all_reduce(whole, ["sum"]),
        lambda c: c.all_reduce(whole, "bxor"),
        lambda c: c.all_to_all_single(torch.zeros(()), torch.zeros(())),
    ]
    said = []
    with without_core(comm) as slow:
        for call in wrong:
            texts = []
            for part in (comm, slow):
                with pytest.raises((TypeError, ValueError)) as caught:
                    call(part)
                texts.append(str(caught.value))
            said.append("" if texts[0] == texts[1] else f"{texts}")
    return said


def test_wrong_calls_are_rejected_like_the_general_path(ranks: RankPool) -> None:
    assert ranks.run(apart, size=2) == [[""] * 8] * 2
