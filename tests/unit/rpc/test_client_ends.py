"""Every call ends once, whatever becomes of its message or its future, so that agents can end."""

from __future__ import annotations

import re
import uuid
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pairwise import short
from rpc_functions import BACKENDS, add, echo, hold, release

import unisono as un
from unisono.comm.mailbox import PointToPointMailbox
from unisono.errors import CommTimeoutError
from unisono.testing import pool, run_ranks

rpc = un.rpc


@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_call_timed_out_during_send_is_not_pending(call: Any) -> None:
    def program(comm: un.Communicator) -> int:
        rpc.init(comm, timeout=30.0)
        if comm.rank == 0:
            # What was posted arrives all the same.
            with patch.object(PointToPointMailbox, "_wait_for", side_effect=CommTimeoutError("late")):
                for _ in range(3):
                    with pytest.raises(CommTimeoutError):
                        call(1, echo, (torch.ones(100_000),))
        comm.barrier()
        found = rpc.rpc_sync(1 - comm.rank, add, (comm.rank, 1))
        rpc.shutdown(timeout=30.0)
        return found

    assert run_ranks(program, 2) == [1, 2]


@short(
    "backend, how",
    product(BACKENDS, ["set_result", "set_exception"]),
    [("thread", "set_result"), ("shm", "set_exception"), ("gloo", "set_result")],
)
def test_externally_completed_future_keeps_its_value(backend: str, how: str) -> None:
    def program(comm: un.Communicator) -> str:
        rpc.init(comm, timeout=30.0)
        found = ""
        if comm.rank == 0:
            key = uuid.uuid4().hex
            future = rpc.rpc_async(1, hold, (key,))
            getattr(future, how)(ValueError("mine"))
            rpc.rpc_sync(1, release, (key,))
            try:
                found = str(future.wait())
            except ValueError as error:
                found = str(error)
        rpc.shutdown(timeout=30.0)
        return found

    assert pool(backend, 3).run(program, size=2)[0] == "mine"


def test_reexposed_name_calls_the_new_function() -> None:
    def program(comm: un.Communicator) -> list[str]:
        rpc.init(comm, timeout=30.0)
        found = []
        if comm.rank == 0:
            for said in ("old", "new"):

                def told(said: str = said) -> str:
                    return said

                told.__qualname__ = told.__name__ = "told_by_the_notebook"
                rpc.expose(told)
                found += [rpc.rpc_sync(1, told) for _ in range(2)]
        rpc.shutdown(timeout=30.0)
        return found

    assert run_ranks(program, 2)[0] == ["old", "old", "new", "new"]


def test_non_numeric_timeout_is_rejected() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=30.0)
        for wrong in ("5", True):
            with pytest.raises(TypeError, match="number of seconds"):
                rpc.rpc_sync(1 - comm.rank, add, (1, 2), timeout=wrong)
        rpc.shutdown(timeout=30.0)

    assert run_ranks(program, 2) == [None, None]


@rpc.expose
def fail_after(hops: int) -> Any:
    """Fail on the rank that comes after so many others."""
    if not hops:
        raise KeyError("far away")
    return rpc.rpc_sync(1 - rpc.get_worker_info().id, fail_after, (hops - 1,))


def test_error_names_each_forwarding_rank_once() -> None:
    def program(comm: un.Communicator) -> int | None:
        rpc.init(comm, timeout=30.0)
        found = None
        if comm.rank == 0:
            with pytest.raises(KeyError) as caught:
                rpc.rpc_sync(1, fail_after, (5,))
            found = str(caught.value).count("On rank")
        rpc.shutdown(timeout=30.0)
        return found

    assert run_ranks(program, 2)[0] == 6


def test_rank_logs_exceptions_of_its_functions(caplog: pytest.LogCaptureFixture) -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=30.0)
        if comm.rank == 0:
            with pytest.raises(KeyError):
                rpc.remote(1, fail_after, (0,)).to_here()
        rpc.shutdown(timeout=30.0)

    run_ranks(program, 2)
    first = next(record for record in caplog.records if record.name == "unisono.rpc.server")
    assert re.fullmatch(r"a call by rank 0 failed on rank 1: \w+\.py:\d+: KeyError: 'far away'", first.getMessage())


def test_an_answer_that_arrives_as_the_time_runs_out_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm, expose=[torch.add])
        # The time is up before the answer is here, and another thread has removed the call to end it.
        monkeypatch.setattr(agent.client, "_wait", lambda call: None)
        monkeypatch.setattr(agent.client.replies, "give_up", lambda call, error: False)
        result = rpc.rpc_sync(0, torch.add, (torch.ones(1), 2))
        rpc.shutdown()
        return result.item()

    assert run_ranks(program, 1) == [3.0]
