"""A rank lost while a subgroup forms: the others get an error, whether it had joined or not."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from insides import control_of

import unisono as un
from unisono.control.state import ControlState
from unisono.errors import CommError, PeerLostError
from unisono.testing import run_ranks

TIMEOUT_S, SOON_S = 20.0, 15.0


def splits(comm: Any, own: bool, there: bool) -> Any:
    """Rank 1 is gone when all have said that they want a part, and before it has come `there`, or just after."""

    def ends(*_: Any) -> None:
        if own:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("gone")

    comm.barrier()
    if comm.rank == 1 and there:
        comm._plain = ends
    elif comm.rank == 1:
        control_of(comm).join = ends
    started = time.monotonic()
    try:
        comm.dup()
    except PeerLostError as error:
        took_s = time.monotonic() - started
        comm = comm.rebuild()
        total = torch.ones(1)
        comm.all_reduce(total)
        return took_s, str(error), total.item()
    return "nothing was raised"


def check(ends: list[Any]) -> None:
    for rank in (0, 2):
        took_s, text, total = ends[rank]
        assert took_s < SOON_S
        assert "rank 1" in text
        assert f"rank {rank} of 3" in text
        assert total == 2.0


@pytest.mark.parametrize("there", [False, True])
def test_with_threads(there: bool) -> None:
    check(run_ranks(splits, 3, "thread", False, there, on_failure="continue", timeout=TIMEOUT_S))


@pytest.mark.parametrize("there", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_with_processes(backend: str, there: bool) -> None:
    check(un.launch(splits, 3, backend, (True, there), threads=1, on_failure="continue", timeout=TIMEOUT_S))


def test_rank_outside_the_subgroup_may_leave() -> None:
    """The part is complete without it."""

    def program(comm: Any) -> float:
        part = comm.subgroup([0, 2])
        if part is None:
            raise KeyError("gone")
        with pytest.raises(CommError):
            comm.barrier()
        total = torch.ones(1)
        part.all_reduce(total)
        return total.item()

    assert run_ranks(program, 3, "thread", on_failure="continue", timeout=TIMEOUT_S)[::2] == [2.0, 2.0]


def told(out: Any, client: int) -> list[Any]:
    """Return the failures that a client receives unasked."""
    return [reply[2] for number, reply in out if number == client and reply[0] == 0]


@pytest.mark.parametrize("go", ["lost", "bye"])
@pytest.mark.parametrize("before", [False, True])
def test_subgroup_names_a_rank_that_left_early(go: str, before: bool) -> None:
    """The rank leaves before or after the others join the subgroup; a rank in no subgroup is not awaited."""
    state, out = ControlState(), []
    for client in range(4):
        state.handle(client, 1, ("join", "world", client, 4, [0, 1, 2, 3]))

    def goes(client: int) -> None:
        out.extend(state.lost(client) if go == "lost" else state.handle(client, 9, ("bye",)))

    goes(3)
    if before:
        goes(1)
    out += state.handle(0, 2, ("join", "world/1.0", 0, 2, [0, 1]))
    out += state.handle(2, 2, ("join", "world/1.1", 0, 1, [2]))
    if not before:
        goes(1)
    assert ("world/1.0", "PeerLostError", 1, "rank 1 was lost before it joined world/1.0") in told(out, 0)
    assert not [cause for cause in told(out, 2) if cause[0] == "world/1.1"]


@pytest.mark.parametrize("members", [[0], [0, "1"], 2, None])
def test_members_are_distinct_ranks(members: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        ControlState().handle(1, 1, ("join", "world", 0, 2, members))
