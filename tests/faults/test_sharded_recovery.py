"""Sharded trainings lose ranks, and nothing else."""

from __future__ import annotations

import json
import operator
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from recovery_helpers import launched, soaked
from sharded_training import STEPS, Training, alone, make_samples, train

import unisono as un
from unisono.testing import KilledError, RankFaults, chaos, run_ranks

# Of more deaths than copies (ranks that have ended count), and of a death while all is created.
REFUSALS = re.compile("shards of ranks .* are lost|before all ranks had a first snapshot")
# All messages before this one are of constructors.
CREATED = 9
KINDS = ["model", "gradients", "states"]


def close(found: Any, wanted: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and bool((found - wanted).abs().max() < 1e-9)


@pytest.mark.parametrize(
    ("kind", "redundancy", "deaths"),
    [
        soaked("model", 1, {1: 3}),
        ("model", 1, {0: 0, 2: 2}),
        ("gradients", 1, {3: 1, 0: 4}),
        soaked("states", 1, {2: 2}),
        ("model", 2, {1: 2, 2: 2}),
    ],
)
def test_survivors_lose_no_step(kind: str, redundancy: int, deaths: dict[int, int]) -> None:
    ends = launched(train, 4, "thread", kind, redundancy, deaths)
    wanted = alone(kind)
    assert [rank for rank, end in enumerate(ends) if not close(end, wanted)] == sorted(deaths), ends


def test_neighbours_that_die_together() -> None:
    """Their shards are lost, and every survivor says so."""

    def program(comm: un.Communicator) -> str:
        training = Training(comm, "model")
        if comm.rank in (1, 2):
            raise KeyError("this rank is gone")
        with pytest.raises(RuntimeError, match=r"shards of ranks \[1.* of 4 are lost.*Load a checkpoint") as caught:
            training.going.recover()
        return str(caught.value)

    ends = launched(program, 4, "thread")
    assert isinstance(ends[0], str), ends
    assert ends[0] == ends[3]


# -- deaths at any message ---------------------------------------------------------------------------
def nearly(outcomes: Sequence[Any], calm: Sequence[Any]) -> str | None:
    """A judge: as `named_or_right`, but that another number of ranks adds in another order, and ranks may refuse."""
    rounded = [
        wanted if close(found, wanted) or (isinstance(found, RuntimeError) and REFUSALS.search(str(found))) else found
        for found, wanted in zip(outcomes, calm, strict=True)
    ]
    return chaos.named_or_right(rounded, calm)


def dies_at(kind: str, message: int, rank: int) -> Any:
    faults = {"on_ranks": RankFaults(kill_at=message, ranks=[rank])}
    return un.simulate(train, 4, (kind,), faults=faults, on_failure="continue", timeout=10)


@pytest.mark.parametrize(("kind", "message"), [("model", 40), soaked("gradients", 20)])
def test_rank_dies_in_the_middle_of_a_step(kind: str, message: int) -> None:
    run, wanted = dies_at(kind, message, 2), alone(kind)
    assert [close(end, wanted) for end in run.results] == [True, True, False, True], run.results
    assert isinstance(run.results[2], KilledError)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_rank_dies_at_every_message(kind: str) -> None:
    """In forward, backward, the optimizer's step, commits, and the end; while all is created, every rank says so."""
    wanted = alone(kind)
    for message in range(1, 400):
        run = dies_at(kind, message, message % 4)
        others = [end for end in run.results if not isinstance(end, KilledError)]
        if len(others) == 4:
            break
        right = [close(end, wanted) for end in others]
        # At the last messages some ranks have ended, and so count as dead, too.
        lost = [isinstance(end, RuntimeError) and "are lost" in str(end) for end in others]
        created = any(right) and all(map(operator.or_, right, lost))
        refused = all(isinstance(end, un.CommError) or "first snapshot" in str(end) for end in others)
        assert created or (refused and message < CREATED), (message, run.results)
    assert message > 30


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_random_faults(kind: str) -> None:
    """Some ranks die during recovery from other deaths."""
    endings = chaos.check(train, 4, kind, seeds=range(5000, 5100), judge=nearly)
    print(f"\n{kind}: {dict(endings.most_common())}")
    assert endings["right"] >= 25
    assert endings["KilledError"] >= 3


# -- on purpose -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("leavers", "kind"), [((1, 2), "model"), ((0,), "states"), soaked((1, 2), "states"), soaked((0,), "model")]
)
def test_ranks_leave(leavers: tuple[int, ...], kind: str) -> None:
    """Neighbours leave together, whose shards no other rank has."""

    def program(comm: un.Communicator) -> torch.Tensor | None:
        training, samples, me = Training(comm, kind), make_samples(), comm.rank
        while training.going.step < STEPS:
            training.step(samples)
            if training.going.step == 2:
                if me in leavers:
                    return training.going.leave()
                training.going.recover()
        assert training.going.comm.size == 4 - len(leavers)
        return training.weights()

    ends = run_ranks(program, 4, "thread", on_failure="continue")
    assert [rank for rank, end in enumerate(ends) if end is None] == sorted(leavers), ends
    assert all(close(end, alone(kind)) for end in ends if end is not None), ends


@pytest.mark.parametrize("kind", ["model", "gradients", soaked("states")])
def test_newcomer_gets_its_share(kind: str) -> None:
    """Rank 2 joins after two steps. The others only lack the communicator that `rebuild(grow=1)` makes."""

    def program(comm: un.Communicator) -> torch.Tensor:
        own, samples = comm.split(comm.rank // 2), make_samples()
        training = Training(own, kind)
        if comm.rank < 2:
            training.step(samples)
            training.step(samples)
            training.going.comm = comm
            assert training.going._follow()
        else:
            with torch.no_grad(), training.whole():
                for parameter in training.model.parameters():
                    parameter.zero_()
            training.going.join(comm)
        while training.going.step < STEPS:
            training.step(samples)
        return training.weights()

    wanted = alone(kind)
    assert all(close(end, wanted) for end in run_ranks(program, 3, "thread"))


NEWCOMER = """
import sys
import torch
import unisono as un
sys.path.insert(0, sys.argv[2])
from sharded_training import STEPS, Training, make_samples
own = un.init("thread")
training = Training(own, sys.argv[3])
with torch.no_grad(), training.whole():
    for parameter in training.model.parameters():
        parameter.zero_()
training.going.join(un.join(pid=int(sys.argv[1]), timeout=60))
while training.going.step < STEPS:
    training.step(make_samples())
print(training.going.comm.rank, training.weights().tolist(), flush=True)
training.going.comm.close()
"""


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_newcomer_that_is_a_process(kind: str) -> None:
    """Ranks 0 and 1 have made two steps; the newcomer makes the others with them."""

    def program(comm: un.Communicator) -> tuple[torch.Tensor, str]:
        training, samples, newcomer = Training(comm, kind), make_samples(), None
        if comm.rank == 0:
            command = [sys.executable, "-c", NEWCOMER, str(os.getpid()), os.path.dirname(__file__), kind]
            newcomer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(2):
            training.step(samples)
        training.going.recover(grow=1, timeout=60)
        assert training.going.comm.size == 3
        while training.going.step < STEPS:
            training.step(samples)
        weights = training.weights()
        return weights, newcomer.communicate(timeout=300)[0] if newcomer is not None else ""

    ends, wanted = launched(program, 2, "shm", timeout=60.0), alone(kind)
    assert all(close(weights, wanted) for weights, _ in ends)
    rank, said = ends[0][1].split(" ", 1)
    assert rank == "2"
    assert close(torch.tensor(json.loads(said), dtype=torch.float64), wanted)


def killed(comm: un.Communicator, kind: str) -> torch.Tensor:
    me, training, samples = comm.rank, Training(comm, kind), make_samples()
    while training.going.step < STEPS:
        try:
            if me == 2 and training.going.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            training.step(samples)
        except un.CommError:
            training.going.recover()
    return training.weights()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("model", "shm"), soaked("model", "gloo"), soaked("gradients", "shm"), soaked("states", "shm")],
)
def test_killed_process(kind: str, backend: str) -> None:
    ends, wanted = launched(killed, 4, backend, kind, timeout=30.0), alone(kind)
    assert [close(end, wanted) for end in ends] == [True, True, False, True], ends


# -- misuse ---------------------------------------------------------------------------------------
def test_optimizer_without_its_model_is_refused() -> None:
    """Its momentum would be that of other elements."""

    def program(comm: un.Communicator) -> str:
        training = Training(comm, "model")
        training.step(make_samples())
        assert training.sharded is not None
        training.going = un.elastic.Recovery(comm, model=training.sharded)
        if comm.rank == 2:
            raise KeyError("this rank is gone")
        with pytest.raises(un.CommError):
            comm.barrier()
        training.going.recover()
        training.model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(RuntimeError, match="divided among other ranks, and its state was not"):
            training.optimizer.step()
        return "refused"

    ends = launched(program, 3, "thread")
    assert ends[:2] == ["refused"] * 2, ends


def test_wrong_arguments() -> None:
    with un.init("thread") as comm:
        with pytest.raises(ValueError, match="redundancy must be a number of ranks, not -1"):
            un.elastic.Recovery(comm, redundancy=-1)
        training = Training(comm, "model")
        with pytest.raises(ValueError, match="with sharded parts, create Recovery with"):
            training.going.join()
