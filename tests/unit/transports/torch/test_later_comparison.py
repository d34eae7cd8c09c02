"""Calls that ranks compare while a device carries them out: what the program learns of a difference, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nccl_stand_in import around, device_of

import unisono as un
from unisono.testing import run_ranks
from unisono.testing.reference import ops_for
from unisono.transports.torch import transport

_AHEAD = 64


def ones(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, dtype=dtype, device="meta")


def on_ranks(program: Callable[[un.Communicator], Any], timeout: float = 10) -> list[Any]:
    def begun(comm: un.Communicator) -> Any:
        # Before the first call has returned, ranks compare each call before it is made.
        comm.all_reduce(ones())
        return program(comm)

    return run_ranks(begun, 2, "gloo", wrap=around, timeout=timeout)


def differ(comm: un.Communicator, **options: Any) -> Any:
    return comm.all_reduce(ones(torch.int32 if comm.rank else torch.float32), **options)


def reduce_often(comm: un.Communicator) -> None:
    for _ in range(3 * _AHEAD):
        comm.all_reduce(ones())


def reduce_on_the_last(comm: un.Communicator, other: Callable[[], object]) -> None:
    """Let rank 0 make another call, and return when all calls have been compared."""
    if comm.rank:
        comm.all_reduce(ones())
    else:
        other()
    comm.barrier()


NEXT: dict[str, Callable[[un.Communicator], object]] = {
    "call": reduce_often,
    "asynchronous call": lambda comm: [comm.all_reduce(ones(), async_op=True).wait() for _ in range(2 * _AHEAD)],
    "barrier": lambda comm: comm.barrier(),
    "agreement": lambda comm: (comm.agree(1, "one"), comm.all_reduce(ones())),
    "close": lambda comm: comm.close(),
}


@pytest.mark.parametrize("name", NEXT)
def test_difference_is_raised_on_all_ranks_in_what_follows(name: str) -> None:
    def program(comm: un.Communicator) -> tuple[str, str]:
        differ(comm)
        assert device_of(comm).launched[:2] == ["allreduce", "allreduce"]
        with pytest.raises(un.errors.MismatchError) as caught:
            NEXT[name](comm)
        comm.close()
        return str(caught.value), caught.value.message

    found = on_ranks(program)
    assert found[0][1] == found[1][1]
    for text, _ in found:
        assert "ranks differ in dtype: rank 0: all_reduce(sum, float32, meta" in text
        assert "test_later_comparison.py:" in text
        assert "This is call 2. Its result, and all that follows from it, may be wrong" in text


def test_difference_ends_the_kernels_that_wait_for_it() -> None:
    def program(comm: un.Communicator) -> type[BaseException] | None:
        device = device_of(comm)
        device.hangs = True
        work = differ(comm, async_op=True)
        device.await_end()
        with pytest.raises(un.errors.MismatchError):
            work.wait()
        return type(comm.exception())

    assert on_ranks(program) == [un.errors.MismatchError] * 2


def test_difference_ends_a_launch_that_waits_for_it() -> None:
    def program(comm: un.Communicator) -> list[str]:
        transport._LAUNCH_S = 0.05
        device = device_of(comm)
        device.blocks = "broadcast"
        with pytest.raises(un.errors.MismatchError):
            reduce_on_the_last(comm, lambda: comm.broadcast(ones(), 0))
        return device.launched

    assert on_ranks(program) == [["allreduce", "broadcast"], ["allreduce", "allreduce"]]


def test_missing_rank_is_named_at_the_timeout_and_the_others_stay_near() -> None:
    def program(comm: un.Communicator) -> str:
        if comm.rank == 1:
            # Until the other rank has given up.
            device_of(comm).await_end()
            return ""
        with pytest.raises(un.errors.CommTimeoutError) as caught:
            reduce_often(comm)
        assert len(device_of(comm).launched) == 1 + _AHEAD
        return str(caught.value)

    assert "for rank 1, which has not arrived" in on_ranks(program, timeout=0.5)[0]


def test_calls_whose_result_the_library_reads_are_compared_before() -> None:
    def program(comm: un.Communicator) -> list[str]:
        with pytest.raises(un.errors.MismatchError):
            reduce_on_the_last(comm, lambda: comm.all_gather_v(ones()))
        return device_of(comm).launched

    assert on_ranks(program)[0] == ["allreduce"]


def test_equal_calls_are_made_in_their_order() -> None:
    def program(comm: un.Communicator) -> tuple[int, list[str]]:
        for _ in range(4 * _AHEAD):
            comm.all_reduce(ones())
            comm.broadcast(ones(torch.int8), 1, async_op=True).wait()
        for _ in range(5):
            # Neither rank may leave before the other's last call has been compared.
            with comm.dup() as other:
                other.all_reduce(ones())
                other.all_reduce(ones(), async_op=True)
        return len(device_of(comm).launched), device_of(comm).launched[-3:]

    assert on_ranks(program) == [(1 + 8 * _AHEAD, ["broadcast", "allreduce", "broadcast"])] * 2


def test_both_paths_of_a_call_make_the_same() -> None:
    """Rank 0 takes the short one, and the other ranks do what needs the long one."""

    def program(comm: un.Communicator) -> list[list[float]]:
        found = []
        for dtype in (torch.float32, torch.float64, torch.float16, torch.complex64, torch.int32, torch.bool):
            for op in ("sum", "avg", "max", "product"):
                if op not in ops_for(dtype):
                    continue
                wide = torch.ones(3, 2, dtype=dtype)
                given = wide[:, 0] if comm.rank == 2 else torch.ones(3, dtype=dtype)
                work = comm.all_reduce(given, op, async_op=comm.rank == 1)
                if work is not None:
                    work.wait()
                found.append(given.tolist())
            # A difference would be found in the shapes that errors quote, too.
            comm.broadcast(torch.full((1,), comm.rank, dtype=dtype), 1, algorithm=None if comm.rank else "native")
        return found

    first, *others = run_ranks(program, 3, "gloo")
    assert others == [first, first]
    assert [values[0] for values in first[:4]] == [3.0, 1.0, 1.0, 1.0]


def test_average_that_is_refused_is_refused_as_on_the_long_path() -> None:
    def program(comm: un.Communicator) -> tuple[str, list[int]]:
        whole = torch.ones(2, dtype=torch.int32)
        with pytest.raises(ValueError, match="fraction") as caught:
            comm.all_reduce(whole, "avg")
        return str(caught.value), whole.tolist()

    for text, values in run_ranks(program, 2, "gloo"):
        assert "avg" in text
        assert values == [1, 1]


@pytest.mark.parametrize(("check", "overlaps"), [("off", True), ("auto", True), ("full", False)])
def test_calls_overlap_with_computation_unless_they_wait_for_a_comparison(check: str, overlaps: bool) -> None:
    assert run_ranks(lambda comm: comm.overlaps, 2, "gloo", wrap=around, check=check) == [overlaps] * 2
