"""Input that periodic averaging rejects: different or invalid models and arguments, ranks that have left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import unisono as un
from unisono.errors import MismatchError, PeerLostError
from unisono.gradients.gossip import Gossip
from unisono.gradients.guards import DivergenceGuard
from unisono.gradients.local_sgd import LocalSGD
from unisono.gradients.periodic import PeriodicAction, every
from unisono.testing import run_ranks
from unisono.utils.parameters import named_tensors


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda rank: torch.nn.Linear(3, 2 + (rank == 1)),
            r"'bias'\]: ranks 0, 2: 'float32 \(2,\) on cpu'; rank 1: 'fl",
        ),
        (lambda rank: torch.nn.Linear(3, 2, bias=rank > 0), r"'bias'\]: rank 0: not there; ranks 1, 2: 'float32"),
        (lambda rank: torch.nn.Linear(3, 2).to(torch.float64 if rank == 2 else torch.float32), "rank 2: 'float64"),
        (
            lambda rank: [(name, torch.ones(2)) for name in ("ab" if rank else "ba")],
            r"order of the parameters of LocalSGD', at \[0\]\[0\]: rank 0: 'b'; ranks 1, 2: 'a'",
        ),
    ],
    ids=["shape", "name", "dtype", "order"],
)
def test_different_models_are_named(make: Callable[[int], torch.nn.Module], said: str) -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=said):
            LocalSGD(make(comm.rank), comm)
        # Nothing is broken by that.
        comm.barrier()
        LocalSGD(torch.nn.Linear(1, 1), comm).average()

    run_ranks(program, 3)


def test_different_arguments_are_named() -> None:
    def program(comm: un.Communicator) -> None:
        LocalSGD(torch.nn.Linear(1, 1), comm, every=4 + comm.rank)

    for error in run_ranks(program, 2, on_failure="continue"):
        assert isinstance(error, MismatchError)
        assert "['every']: rank 0: 'PeriodicSchedule(n=4, warmup=0)'; rank 1: 'PeriodicSchedule(n=5" in str(error)


@pytest.mark.parametrize(
    ("n", "warmup", "error", "said"),
    [
        (0, 0, ValueError, "every must be at least 1 step, not 0"),
        (-3, 0, ValueError, "at least 1"),
        (1, -1, ValueError, "warmup must be at least 0 steps, not -1"),
        (2.5, 0, TypeError, "every must be a number of steps, not float"),
        (True, 0, TypeError, "not bool"),
    ],
)
def test_bad_schedules(n: int, warmup: int, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        every(n, warmup=warmup)


def test_bad_models() -> None:
    parameters = torch.nn.Linear(2, 2).parameters()
    assert len(named_tensors(parameters)) == 2
    with pytest.raises(ValueError, match="exhausted iterator"):
        named_tensors(parameters)
    with pytest.raises(TypeError, match="not a single Tensor"):
        named_tensors(torch.zeros(2))
    with pytest.raises(TypeError, match="parameter 1 must be a tensor, not int"):
        named_tensors([torch.zeros(2), 3])  # type: ignore[list-item]  # on purpose
    with pytest.raises(ValueError, match="needs the module"):
        named_tensors([torch.zeros(2)], buffers=True)
    shared = torch.zeros(2)
    assert [name for name, _ in named_tensors([shared, torch.ones(2), shared])] == ["parameter 0", "parameter 1"]


def test_bad_schedule_sends_nothing() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match="at least 1 step"):
            LocalSGD([torch.zeros(1)], comm, every=0)
        comm.barrier()

    run_ranks(program, 2)


@pytest.mark.parametrize("make", [LocalSGD, Gossip, DivergenceGuard])
def test_departed_rank_is_named(make: Callable[..., PeriodicAction]) -> None:
    def program(comm: un.Communicator) -> None:
        periodic = make([torch.zeros(3)], comm, every=1)
        if comm.rank != 1:
            periodic.step()

    errors = run_ranks(program, 2, "sim", on_failure="continue")
    assert isinstance(errors[0], PeerLostError)
    assert errors[0].peer == 1
    assert errors[1] is None
