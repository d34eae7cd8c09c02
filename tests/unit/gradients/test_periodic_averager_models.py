"""Periodic averaging of a model that is loaded, replaced or changed, and of ranks at different steps."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.errors import AbortedError, MismatchError, PeerLostError
from unisono.gradients import DivergenceGuard, Gossip, PeriodicAverager, every
from unisono.gradients.local_sgd import DiLoCo, LocalSGD
from unisono.testing import pool, run_ranks

WAYS: list[dict[str, Any]] = [{}, {"fragments": 2}, {"overlap_steps": 1}, {"overlap_steps": 1, "alpha": 0.5}]


def model_of(value: float = 0.125) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fill(model, value)
    return model


@torch.no_grad()
def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.fill_(value)


@torch.no_grad()
def learn(model: nn.Module, change: float) -> None:
    for parameter in model.parameters():
        parameter += change


def tens(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 10.0) for name, tensor in model.state_dict().items()}


def values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}


def load(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    model.load_state_dict(tens(model))


def load_and_assign(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    model.load_state_dict(tens(model), assign=True)


def load_layers(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    for layer in model:
        layer.load_state_dict(tens(layer))


def load_and_widen(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    model.double().load_state_dict(tens(model))


def load_inside_another(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    outer = nn.ModuleDict({"inner": model})
    outer.load_state_dict(tens(outer))


def load_a_checkpoint(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    un.checkpoint.save(path, {"model": tens(model)}, comm)
    un.checkpoint.load(path, {"model": model}, comm)


def load_and_broadcast(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    if comm.rank == 0:
        model.load_state_dict(tens(model))
    un.broadcast_parameters(model, comm)


def load_and_sync(model: nn.Sequential, comm: un.Communicator, path: Path) -> None:
    if comm.rank == 0:
        model.load_state_dict(tens(model))
    un.checkpoint.sync({"model": model}, comm)


LOADS = [
    load,
    load_and_assign,
    load_layers,
    load_and_widen,
    load_inside_another,
    load_a_checkpoint,
    load_and_broadcast,
    load_and_sync,
]


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_loaded_weights_stay_without_training(
    how: Callable[..., None], options: dict[str, Any], tmp_path: Path
) -> None:
    """Loaded in the middle of an interval: nothing is left of what ranks had learnt before, nor of the momentum."""

    def program(comm: un.Communicator) -> set[float]:
        model = model_of()
        diloco = DiLoCo(model, comm, every=2, **options)
        for _ in range(3):
            learn(model, 0.5 * comm.rank)
            diloco.step()
        how(model, comm, tmp_path)
        for _ in range(6):
            diloco.step()
        diloco.finish()
        return values(model) | {value for there in diloco.anchor for value in there.flatten().tolist()}

    assert run_ranks(program, 2) == [{10.0}] * 2


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "backend", ["thread", *(pytest.param(b, marks=pytest.mark.soak) for b in ("shm", "tcp", "gloo"))]
)
def test_training_goes_on_from_loaded_weights(backend: str, size: int) -> None:
    def program(comm: un.Communicator) -> set[float]:
        model = model_of()
        diloco = DiLoCo(model, comm, every=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
        model.load_state_dict(tens(model))
        for _ in range(4):
            learn(model, comm.rank)
            diloco.step()
        return values(model)

    assert pool(backend).run(program, size=size) == [{10.0 + 4 * (size - 1) / 2}] * size


def test_results_under_way_are_dropped_without_an_anchor() -> None:
    def program(comm: un.Communicator) -> set[float]:
        model = model_of()
        averager = PeriodicAverager(model, comm, 2, overlap_steps=1)
        learn(model, comm.rank)
        averager.step()
        averager.step()
        model.load_state_dict(tens(model))
        averager.step()
        assert averager.rounds == 1
        return values(model)

    assert run_ranks(program, 2) == [{10.0}] * 2


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("after_the_error", [False, True])
def test_weights_loaded_during_an_exchange_that_fails_stay(after_the_error: bool, part: bool) -> None:
    """A prediction is undone in what was trained only, and not in what has replaced it."""

    def program(comm: un.Communicator) -> tuple[set[float], set[float]]:
        model = model_of(0.0)
        diloco = DiLoCo(model, comm, 4, 0.7, 0.9, True, overlap_steps=2)

        def load() -> None:
            for layer in [model[0]] if part else model:
                layer.load_state_dict({name: torch.full_like(t, 100.0) for name, t in layer.state_dict().items()})

        for _ in range(4):
            learn(model, 1.0)
            if comm.rank == 2 and diloco.steps == 3:
                raise KeyError("this rank is gone")
            diloco.step()
        if not after_the_error:
            load()
        with pytest.raises(PeerLostError):
            diloco.state_dict()
        if after_the_error:
            load()
        diloco.move_to(comm.rebuild())
        return values(model[0]), values(model[1])

    ends = un.simulate(program, 3, on_failure="continue").results
    assert ends[:2] == [({100.0}, {4.0} if part else {100.0})] * 2


def test_samples_of_an_exchange_that_fails_do_not_count_for_loaded_weights() -> None:
    """They are of training that the loaded weights have replaced, and ranks differ in their number."""

    def program(comm: un.Communicator) -> set[float]:
        model = model_of(0.0)
        diloco = DiLoCo(model, comm, every(timedelta(seconds=10)), 1.0, 0.0, False, overlap_steps=50)
        while diloco.steps < 12:
            time.sleep(1.0)
            if comm.rank == 2 and diloco.steps == 9:
                # The others contribute at 11 s, and wait for this rank.
                time.sleep(5.0)
                raise KeyError("this rank is gone")
            diloco.step(1 + 9 * comm.rank)
        model.load_state_dict(tens(model))
        with pytest.raises(PeerLostError):
            diloco.finish()
        diloco.move_to(comm.rebuild())
        learn(model, 1.0 + 2 * comm.rank)
        diloco.step(5)
        diloco.finish()
        return values(model)

    ends = un.simulate(program, 3, on_failure="continue").results
    assert ends[:2] == [{12.0}] * 2


def test_a_part_that_is_loaded_during_an_exchange_leaves_the_rest_alone() -> None:
    def program(comm: un.Communicator, loads: bool) -> tuple[set[float], set[float]]:
        model = model_of(0.0)
        diloco = DiLoCo(model, comm, 2, 0.7, 0.9, True, overlap_steps=1)
        for step in range(5):
            learn(model, 1.0 + comm.rank)
            diloco.step()
            if loads and step == 3:
                model[0].load_state_dict(tens(model[0]))
        return values(model[0]), values(model[1])

    plain = run_ranks(program, 2, "thread", False)
    loaded = run_ranks(program, 2, "thread", True)
    assert [rest for _, rest in loaded] == [rest for _, rest in plain]
    assert [first for first, _ in loaded] == [{11.0}, {12.0}]


@pytest.mark.parametrize("part", [False, True])
def test_what_was_loaded_during_an_exchange_is_known_to_a_resumed_averager(part: bool) -> None:
    def program(comm: un.Communicator, resumes: bool) -> tuple[set[float], set[float], int]:
        model = model_of(0.0)
        diloco = DiLoCo(model, comm, 2, 0.7, 0.9, True, overlap_steps=1)
        for _ in range(4):
            learn(model, 1.0 + comm.rank)
            diloco.step()
        for layer in [model[0]] if part else model:
            layer.load_state_dict(tens(layer))
        if resumes:
            state = copy.deepcopy(diloco.state_dict())
            diloco = DiLoCo(model_of(0.0), comm, 2, 0.7, 0.9, True, overlap_steps=1)
            diloco._model.load_state_dict(model.state_dict())
            model = diloco._model
            diloco.load_state_dict(state)
        for _ in range(3):
            learn(model, 1.0 + comm.rank)
            diloco.step()
        return values(model[0]), values(model[1]), diloco.rounds

    assert run_ranks(program, 2, "thread", True) == run_ranks(program, 2, "thread", False)


def test_weights_loaded_by_some_ranks_are_an_error_after_a_move_too() -> None:
    def program(comm: un.Communicator) -> None:
        model = model_of(0.0)
        diloco = DiLoCo(model, comm, 4, overlap_steps=2)
        for _ in range(4):
            learn(model, 1.0)
            if comm.rank == 2 and diloco.steps == 3:
                raise KeyError("this rank is gone")
            diloco.step()
        if comm.rank == 1:
            model.load_state_dict(tens(model))
        with pytest.raises(PeerLostError):
            diloco.state_dict()
        diloco.move_to(comm.rebuild())
        with pytest.raises(MismatchError, match="digests of what was loaded"):
            diloco.outer_step()

    assert un.simulate(program, 3, on_failure="continue").results[:2] == [None, None]


def test_a_rank_that_joins_before_the_first_exchange_takes_the_others_anchor() -> None:
    def program(comm: un.Communicator) -> list[float]:
        alone = comm.rank == 1
        model = model_of(50.0 if alone else 0.0)
        diloco = DiLoCo(model, comm.split(comm.rank), 4, 1.0, 0.0, False)
        for _ in range(0 if alone else 2):
            learn(model, 1.0)
            diloco.step()
        diloco.move_to(comm)
        learn(model, 1.0)
        diloco.outer_step()
        return sorted(values(model))

    assert run_ranks(program, 2) == [[2.0]] * 2


def test_ranks_of_different_speed_follow_too() -> None:
    def program(comm: un.Communicator) -> set[float]:
        model = model_of()
        diloco = DiLoCo(model, comm, every(timedelta(seconds=60), max_lag=1), overlap_steps=1)
        for _ in range(3 + comm.rank):
            learn(model, comm.rank)
            diloco.step(4)
        model.load_state_dict(tens(model))
        diloco.finish()
        return values(model)

    assert run_ranks(program, 2) == [{10.0}] * 2


def test_a_part_that_is_loaded_leaves_the_rest_alone() -> None:
    def program(comm: un.Communicator) -> tuple[set[float], set[float]]:
        model = model_of(0.0)
        diloco = DiLoCo(model, comm, every=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
        learn(model, 2.0 * comm.rank)
        diloco.step()
        model[0].load_state_dict(tens(model[0]))
        diloco.step()
        return values(model[0]), values(model[1])

    assert run_ranks(program, 2) == [({10.0}, {1.0})] * 2


def test_tied_weights_follow_by_each_of_their_names() -> None:
    def program(comm: un.Communicator) -> set[float]:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        model["b"].weight = model["a"].weight  # type: ignore[assignment]  # of a dict of modules
        fill(model, 0.0)
        diloco = DiLoCo(model, comm, every=1)
        model["b"].load_state_dict(tens(model["b"]))
        diloco.step()
        return values(model)

    assert run_ranks(program, 2) == [{10.0}] * 2


@pytest.mark.parametrize("model_first", [False, True])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_state_of_its_own_holds_in_either_order(options: dict[str, Any], model_first: bool) -> None:
    """In the middle of an interval, where the anchor is not what the model holds."""

    def program(comm: un.Communicator) -> tuple[set[float], set[float]]:
        model = model_of()
        diloco = DiLoCo(model, comm, every=4, **options)

        def go(steps: int) -> None:
            for _ in range(steps):
                learn(model, 0.25 * comm.rank)
                diloco.step()

        go(6)
        saved = copy.deepcopy(diloco.state_dict()), copy.deepcopy(model.state_dict())
        go(6)
        expected = values(model)
        if model_first:
            model.load_state_dict(saved[1])
        diloco.load_state_dict(saved[0])
        if not model_first:
            model.load_state_dict(saved[1])
        go(6)
        return values(model), expected

    for found, expected in run_ranks(program, 2):
        assert found == expected


def test_a_checkpoint_of_both_resumes(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> tuple[set[float], set[float]]:
        model = model_of()
        diloco = DiLoCo(model, comm, every=4)
        state = {"diloco": diloco, "model": un.checkpoint.PerRank(model)}
        found = []
        for resumed in (False, True):
            if resumed:
                un.checkpoint.load(tmp_path, state, comm)
            for step in range(8 * (not resumed)):
                if step == 2:
                    un.checkpoint.save(tmp_path, state, comm)
                learn(model, 0.25 * comm.rank)
                diloco.step()
            for _ in range(6 * resumed):
                learn(model, 0.25 * comm.rank)
                diloco.step()
            found.append(values(model))
        return found[0], found[1]

    for whole, resumed in run_ranks(program, 2):
        assert whole == resumed


def test_weights_loaded_by_some_ranks_only_are_an_error() -> None:
    def program(comm: un.Communicator) -> None:
        model = model_of()
        diloco = DiLoCo(model, comm, every=1)
        if comm.rank == 1:
            model.load_state_dict(tens(model))
        diloco.step()

    for error in run_ranks(program, 3, on_failure="continue"):
        assert isinstance(error, MismatchError)
        assert "digests of what was loaded" in str(error)


def resize(model: nn.Sequential) -> None:
    model[0].weight.data = torch.zeros(3, 2)


def replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.ones(2, 2))


def add(model: nn.Sequential) -> None:
    model.insert(0, nn.Linear(2, 2))


def remove(model: nn.Sequential) -> None:
    del model[1]


@pytest.mark.parametrize("change", [resize, replace, add, remove])
def test_other_changes_end_averaging_on_all_ranks(change: Callable[[nn.Sequential], None]) -> None:
    def program(comm: un.Communicator) -> None:
        model = model_of()
        diloco = DiLoCo(model, comm, every=1)
        diloco.step()
        if comm.rank == 0:
            change(model)
        diloco.step()

    first, second = run_ranks(program, 2, on_failure="continue")
    said = "was added, removed, resized, moved or replaced since its averager was created"
    assert isinstance(first, RuntimeError)
    assert said in str(first)
    assert isinstance(second, AbortedError)
    assert said in str(second)


def test_plain_averages_follow_what_replaces_a_parameter() -> None:
    def program(comm: un.Communicator) -> set[float]:
        model = model_of()
        local = LocalSGD(model, comm, every=1)
        for name, parameter in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.full_like(parameter, float(comm.rank))))
        local.step()
        return values(model)

    assert run_ranks(program, 2) == [{0.5}] * 2


def test_an_averager_ends_before_its_model_and_copies_have_none() -> None:
    def program(comm: un.Communicator) -> tuple[bool, int]:
        model = model_of()
        diloco = DiLoCo(model, comm)
        with pytest.raises(TypeError, match="a DiLoCo communicates with other ranks"):
            copy.deepcopy(diloco)
        twin = copy.deepcopy(model)
        twin.load_state_dict(tens(twin))
        assert diloco.anchor[0].unique().tolist() == [0.125]
        diloco.close()
        gone = weakref.ref(diloco)
        del diloco
        gc.collect()
        return gone() is None, len(model[0]._load_state_dict_post_hooks)

    assert run_ranks(program, 1) == [(True, 0)]


KINDS: dict[str, Callable[[nn.Module, un.Communicator], Any]] = {
    "LocalSGD": lambda model, comm: LocalSGD(model, comm, every=4),
    "DiLoCo": lambda model, comm: DiLoCo(model, comm, every=4),
    "DiLoCo later": lambda model, comm: DiLoCo(model, comm, every=4, overlap_steps=1),
    "DiLoCo compressed": lambda model, comm: DiLoCo(model, comm, every=4, compression="bf16"),
    "median": lambda model, comm: PeriodicAverager(model, comm, 4, reduce="median"),
    "Gossip": lambda model, comm: Gossip(model, comm, every=4),
    "DivergenceGuard": lambda model, comm: DivergenceGuard(model, comm, every=4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_resumed_from_different_steps(kind: str, size: int) -> None:
    def program(comm: un.Communicator) -> None:
        action = KINDS[kind](model_of(), comm)
        state = action.state_dict()
        state["steps"] = 4 * (comm.rank == 1)
        action.load_state_dict(state)
        for _ in range(8):
            action.step()

    errors = run_ranks(program, size, on_failure="continue")
    assert any(isinstance(error, MismatchError) for error in errors)
    assert all(isinstance(error, MismatchError | AbortedError) for error in errors)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_took_different_numbers_of_steps(kind: str) -> None:
    def program(comm: un.Communicator) -> None:
        action = KINDS[kind](model_of(), comm)
        for _ in range(5 + comm.rank):
            action.step()
        action._now()

    for error in run_ranks(program, 2, on_failure="continue"):
        assert isinstance(error, MismatchError)
        assert "steps" in str(error)


def test_ranks_at_different_rounds() -> None:
    def program(comm: un.Communicator) -> None:
        local = LocalSGD(model_of(), comm, every=1)
        local.load_state_dict({**local.state_dict(), "rounds": [comm.rank]})
        local.step()

    for error in run_ranks(program, 2, on_failure="continue"):
        assert isinstance(error, MismatchError)
        assert "['rounds']: rank 0: 0; rank 1: 1" in str(error)
