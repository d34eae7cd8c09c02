"""Asynchronous sums over gloo whose fingerprints are not compared: errors, timeouts and threads."""

from __future__ import annotations

import threading

import pytest
import torch

import unisono as un
from unisono.core.work import wait_any
from unisono.testing import pool, run_ranks


def test_wait_names_missing_rank_call_and_line() -> None:
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
    assert "test_collectives_async.py:" in told
    assert other == "left alone"


def test_wait_with_a_timeout_breaks_nothing_and_polling_starts_one_thread() -> None:
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
