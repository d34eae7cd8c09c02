"""Parameters of an averaged model that are replaced: noticed early, with one clear error on every rank."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from averager_helpers import BACKENDS, check, loss, quickly, right, sample, stack, weight
from model_changes import CHANGES, HARMLESS, NAME, prepared
from pairwise import short
from torch import nn

import unisono as un
from unisono.testing import pool, run_ranks

NOTICES = ["forward", "forward of a part", "check", "backward"]


def notice(how: str, model: nn.Sequential, averager: un.GradientAverager, known: nn.Parameter) -> None:
    """Do one of the things that have to notice a change.

    Args:
        how: One of NOTICES.
        model: The changed model.
        averager: Its averager.
        known: The first layer's weight from before the change.
    """
    if how == "forward":
        model(sample(0).to(next(model.parameters()).dtype))
    elif how == "forward of a part":
        model[0](sample(0).to(weight(model, 0).dtype))
    elif how == "check":
        check(averager)
    else:
        # No module is called, so that the end of the pass is the first that can notice.
        known.requires_grad_(True)
        torch.nn.functional.linear(sample(0).to(known.dtype), known).sum().backward()


def renewed(model: nn.Sequential, comm: un.Communicator, averager: un.GradientAverager) -> bool:
    """Return whether a new averager of the changed model is right."""
    averager.remove()
    with torch.no_grad():
        model(sample(0).to(next(model.parameters()).dtype))
    model.zero_grad()
    averager = un.GradientAverager(model, comm)
    found = right(model, comm)
    averager.remove()
    return found


# A swap takes the hooks away, so that no backward pass notices it.
REPORTED = [case for case in product(CHANGES, NOTICES) if case != ("converted by swap", "backward")]


@short("change, how", REPORTED, [case for case in zip(CHANGES, NOTICES * 4, strict=False) if case in REPORTED])
def test_replaced_parameters_are_reported(change: str, how: str) -> None:
    def program(comm: un.Communicator) -> tuple[str, bool]:
        model = prepared(stack(), change)
        averager = un.GradientAverager(model, comm)
        assert right(model, comm)
        known = next(model[0].parameters())
        CHANGES[change](model)
        with pytest.raises(RuntimeError) as caught:
            notice(how, model, averager, known)
        comm.barrier()
        return str(caught.value), renewed(model, comm, averager)

    for message, fine in pool("thread", 2).run(program):
        assert re.search(NAME, message)
        assert "remove()" in message
        assert fine


def changed_on_rank_1(comm: un.Communicator, change: str, how: str, *, first: bool) -> tuple[str, bool]:
    """Change the model of rank 1 alone while rank 0 takes a step; the error, and whether a new averager is right."""
    model = prepared(stack(), change)
    averager = un.GradientAverager(model, comm)
    assert right(model, comm)
    if comm.rank == 1:
        known = weight(model, 0) if change != "weight_norm removed" else next(model[0].parameters())
        CHANGES[change](model)
        with pytest.raises(RuntimeError) as caught:
            notice(how, model, averager, known)
        assert not isinstance(caught.value, un.CommError)
    if first:
        comm.barrier()
    if comm.rank == 0:
        with quickly(), pytest.raises(un.CommError) as caught:
            loss(model, comm.rank).backward()
    # The communicator of the caller is as good as before.
    comm.barrier()
    if comm.rank == 0:
        CHANGES[change](model)
    return str(caught.value), renewed(model, comm, averager)


@pytest.mark.parametrize("change", CHANGES)
def test_unchanged_rank_fails_promptly_with_the_reason(change: str) -> None:
    for message, fine in pool("thread", 2).run(lambda comm: changed_on_rank_1(comm, change, "forward", first=False)):
        assert re.search(NAME, message)
        assert "remove()" in message
        assert fine


@short(
    "backend, how, first",
    product(BACKENDS, NOTICES, [True, False]),
    list(zip(["thread", "gloo", "shm", "gloo"], NOTICES, [True, False, False, True], strict=True)),
)
def test_every_detection_is_reported_to_the_other_rank(backend: str, how: str, first: bool) -> None:
    change = "set in _parameters"
    for message, fine in pool(backend, 2).run(lambda comm: changed_on_rank_1(comm, change, how, first=first)):
        assert "1.weight" in message
        assert "remove()" in message
        assert fine


def test_check_returns_none_for_unchanged_parameters() -> None:
    def program(comm: un.Communicator) -> bool:
        model = stack()
        averager = un.GradientAverager(model, comm)
        before = check(averager)
        fine = right(model, comm)
        return before is None and fine and check(averager) is None

    assert pool("thread", 2).run(program) == [True, True]


@pytest.mark.parametrize("change", HARMLESS)
def test_unchanged_parameters_are_accepted(change: str) -> None:
    def program(comm: un.Communicator) -> bool:
        model = stack()
        averager = un.GradientAverager(model, comm)
        assert right(model, comm)
        HARMLESS[change](model)
        assert check(averager) is None
        model[0](sample(0))
        return right(model, comm) and check(averager) is None

    assert pool("thread", 2).run(program) == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_call_on_one_rank(backend: str) -> None:
    def program(comm: un.Communicator) -> bool:
        model = stack()
        averager = un.GradientAverager(model, comm)
        if comm.rank == 1:
            HARMLESS["called with parameters of another model"](model)
        fine = right(model, comm) and check(averager) is None
        averager.remove()
        return fine

    assert pool(backend, 2).run(program) == [True, True]


def test_functional_call_during_compilation_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flag of compilation is one for the whole process."""

    def program(comm: un.Communicator) -> bool:
        model = stack()
        averager = un.GradientAverager(model, comm, find_unused_parameters=True)
        comm.barrier()
        if comm.rank == 1:
            monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
            HARMLESS["called with parameters of another model"](model)
            monkeypatch.undo()
        fine = right(model, comm) and check(averager) is None
        averager.remove()
        return fine

    assert run_ranks(program, 2) == [True, True]


def test_load_state_dict_with_assign_does_not_raise() -> None:
    """Loading is not a step of training: the next one notices, and `remove()` in between is in time."""

    def program(comm: un.Communicator) -> bool:
        model = stack()
        averager = un.GradientAverager(model, comm)
        CHANGES["loaded and assigned"](model)
        return renewed(model, comm, averager)

    assert pool("thread", 2).run(program) == [True, True]


def test_uninitialized_parameters_are_rejected() -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
        with pytest.raises(ValueError, match="uninitialized") as caught:
            un.GradientAverager(model, comm)
        model(torch.ones(1, 4))
        un.GradientAverager(model, comm)
        return str(caught.value)

    for message in pool("thread", 2).run(program):
        assert "'1.weight'" in message
        assert "forward" in message
