"""Asynchronous sums over gloo take a shorter way where nothing is compared, with the same results and errors."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

import unisono as un
from unisono.testing import pool, run_ranks
from unisono.transports.torch import TorchTransport
from unisono.work import wait_any

KINDS = {
    "matrix": lambda: torch.arange(6.0).view(2, 3),
    "integers": lambda: torch.arange(5),
    "half": lambda: torch.arange(4).to(torch.float16),
    "one number": lambda: torch.tensor(3.0),
    "nothing": lambda: torch.empty(0),
    "a column": lambda: torch.arange(6.0).view(2, 3)[:, 1],
    "bools": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j, 3 - 1j]),
    "a negative view": lambda: torch.tensor([1 + 2j]).conj().imag,
    "a parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
}
SHORT = {"matrix", "integers", "half", "one number"}


def test_sums_are_right_whichever_way_they_go() -> None:
    def program(comm: un.Communicator) -> dict[str, tuple[bool, bool]]:
        unchecked, found = comm.dup(check="off"), {}
        unchecked.barrier()
        start, short = TorchTransport.quick_start, []

        def noting(self: TorchTransport, tensor: torch.Tensor, op: str) -> un.Work | None:
            work = start(self, tensor, op)
            short.append(work is not None)
            return work

        with mock.patch.object(TorchTransport, "quick_start", noting), torch.no_grad():
            for name, make in KINDS.items():
                tensor, once = make(), make()
                unchecked.all_reduce(tensor, async_op=True).wait()
                wanted = once if once.dtype is torch.bool else once * comm.size
                found[name] = torch.equal(tensor, wanted), short.pop()
        unchecked.close()
        return found

    for found in pool("gloo", 2).run(program):
        assert found == {name: (True, name in SHORT) for name in KINDS}


def test_a_rank_that_does_not_come_is_told_at_wait_with_the_call_and_its_line() -> None:
    def program(comm: un.Communicator) -> str:
        unchecked = comm.dup(check="off")
        unchecked.all_reduce(torch.ones(2), async_op=True).wait()
        if comm.rank == 1:
            with pytest.raises(un.errors.CommError):
                comm.barrier()
            return "left alone"
        work = unchecked.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(un.errors.CommTimeoutError) as caught:
            work.wait()
        assert work.exception() is caught.value
        with pytest.raises(un.errors.CommError):
            unchecked.all_reduce(torch.ones(2), async_op=True)
        return str(caught.value)

    told, other = run_ranks(program, 2, "gloo", timeout=1)
    assert "all_reduce #2" in told
    assert "test_quick_start.py:" in told
    assert other == "left alone"


def test_a_wait_that_is_told_its_time_breaks_nothing_and_looking_starts_one_thread_at_most() -> None:
    def program(comm: un.Communicator) -> list[float]:
        unchecked = comm.dup(check="off")
        t = torch.ones(2)
        unchecked.all_reduce(t, async_op=True).wait()
        if comm.rank == 1:
            # The other rank looks first.
            comm.barrier()
        work = unchecked.all_reduce(t, async_op=True)
        if comm.rank == 0:
            before = threading.active_count()
            for _ in range(5):
                with pytest.raises(un.errors.CommTimeoutError):
                    work.wait(0.01)
                with pytest.raises(un.errors.CommTimeoutError):
                    wait_any([work, work], timeout=0.01)
            assert threading.active_count() <= before + 1
            comm.barrier()
        work.wait()
        unchecked.all_reduce(t)
        unchecked.close()
        return t.tolist()

    assert pool("gloo", 2).run(program) == [[8.0, 8.0]] * 2
