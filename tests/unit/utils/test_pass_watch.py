"""Backward passes of several models: one order where they share a pass, and an error where ranks cross them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import unisono as un
from unisono.testing import pool
from unisono.utils.pass_watch import PassWatch

SPREAD = [
    ("thread", 2),
    ("thread", 3),
    pytest.param("sim", 3, marks=pytest.mark.soak),
    ("shm", 2),
    pytest.param("shm", 3, marks=pytest.mark.soak),
    pytest.param("tcp", 2, marks=pytest.mark.soak),
    pytest.param("tcp", 3, marks=pytest.mark.soak),
    pytest.param("gloo", 2, marks=pytest.mark.soak),
    pytest.param("gloo", 3, marks=pytest.mark.soak),
]
EACH = pytest.mark.parametrize(("backend", "size"), SPREAD)
WAIT_S = 60
Models = list[nn.Linear]


def averaged(comm: un.Communicator, count: int = 2, **options: object) -> tuple[Models, list[un.GradientAverager]]:
    models = [nn.Linear(2, 1) for _ in range(count)]
    return models, [un.GradientAverager(model, comm, **options) for model in models]  # type: ignore[arg-type]


def loss(model: nn.Linear, factor: float) -> torch.Tensor:
    """Has the gradient `factor` for each weight."""
    loss: torch.Tensor = model(torch.full((1, 2), factor)).sum()
    return loss


def rotated(models: Models, by: int) -> Models:
    return models[by:] + models[:by]


def common_loss(comm: un.Communicator, weighted: bool) -> list[float]:
    """Each rank adds up the terms in another order. Small buckets leave during the pass where the backend overlaps."""
    models, averagers = averaged(comm, 3, bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
    for _ in range(2):
        for model, averager in zip(models, averagers, strict=True):
            model.zero_grad()
            if weighted:
                averager.weight(comm.rank)
        torch.stack([loss(model, 1.0 + comm.rank) for model in rotated(models, comm.rank)]).sum().backward()
    return [number for model in models for number in model.weight.grad.unique().tolist()]  # type: ignore[union-attr]


@EACH
@pytest.mark.parametrize("weighted", [False, True])
def test_terms_of_a_common_loss_in_any_order(backend: str, size: int, weighted: bool) -> None:
    weights = list(range(size)) if weighted else [1] * size
    mean = sum(weight * (1 + rank) for rank, weight in enumerate(weights)) / sum(weights)
    for found in pool(backend, size).run(common_loss, weighted):
        assert found == pytest.approx([mean] * 3)


def common_loss_of_shards(comm: un.Communicator) -> list[float]:
    """Several buckets, each of which is full before the first gradient of the next model."""
    models = [nn.Linear(2, 1) for _ in range(2)]
    optimizers = []
    for model in models:
        nn.init.zeros_(model.weight)
        options = {"shard_gradients": True, "bucket_cap_mb": 1e-5, "lr": 1.0}
        optimizers.append(un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, elementwise=True, **options))
    torch.stack([loss(model, 1.0 + comm.rank) for model in rotated(models, comm.rank)]).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return [number for model in models for number in model.weight.unique().tolist()]


@EACH
def test_shards_of_a_common_loss_in_any_order(backend: str, size: int) -> None:
    for found in pool(backend, size).run(common_loss_of_shards):
        assert found == pytest.approx([-(1 + size) / 2] * 2)


def some_wait(comm: un.Communicator) -> list[float]:
    """Ranks that only accumulate for one model, and frozen models, leave the others' order as it is."""
    models, averagers = averaged(comm, 3)
    models[1].requires_grad_(False)
    with averagers[0].no_sync():
        torch.stack([loss(model, 1.0 + comm.rank) for model in rotated(models, comm.rank)]).sum().backward()
    return [models[0].weight.grad[0, 0].item(), models[2].weight.grad[0, 0].item()]  # type: ignore[index]


def test_models_that_do_not_average_in_a_common_pass() -> None:
    assert pool("thread", 2).run(some_wait) == [[1.0, 1.5], [2.0, 1.5]]


def crossed(comm: un.Communicator) -> None:
    models, _ = averaged(comm)
    for model in rotated(models, comm.rank % 2):
        loss(model, 1.0).backward()


def lacking(comm: un.Communicator) -> None:
    models, _ = averaged(comm)
    for _ in range(3):
        terms = [loss(model, 1.0) for model in models]
        (sum(terms) if comm.rank == 0 else terms[0]).backward()  # type: ignore[union-attr]


def sharded(comm: un.Communicator) -> None:
    models = [nn.Linear(2, 1) for _ in range(2)]
    optimizers = [
        un.sharding.ShardedOptimizer(torch.optim.SGD, model, comm, shard_gradients=True, lr=0.1, elementwise=True)
        for model in models
    ]
    for model in rotated(models, comm.rank % 2):
        loss(model, 1.0).backward()
    for optimizer in optimizers:
        optimizer.step()


KINDS = {crossed: "GradientAverager", lacking: "GradientAverager", sharded: "ShardedOptimizer"}
SHORT = {(crossed, "thread", 3), (lacking, "thread", 2), (sharded, "thread", 2), (crossed, "shm", 2)}
CROSSED = [
    pytest.param(program, backend, size, marks=[] if (program, backend, size) in SHORT else pytest.mark.soak)
    for program in KINDS
    for backend in ("thread", "sim", "shm", "tcp", "gloo")
    for size in (2, 3)
]


@pytest.mark.parametrize(("program", "backend", "size"), CROSSED)
def test_crossed_passes_are_named_soon(
    program: Callable[[un.Communicator], None], backend: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks that are processes look as often as those of users do.
    monkeypatch.setattr("unisono.utils.pass_watch._EVERY_S", 0.05)
    one = f"the {KINDS[program]} created at test_pass_watch.py:[0-9]+"
    with pytest.raises(un.CommError, match=f"backward passes of {one} and {one} wait for each other") as caught:
        un.launch(program, size, backend, timeout=WAIT_S)
    assert caught.value.waited_s is None or caught.value.waited_s < WAIT_S / 2


def begins_anew(comm: un.Communicator, place: str) -> list[bool]:
    """Repeat a step after an error on rank 1, and return whether each model has the gradients of all ranks.

    Args:
        comm: All ranks.
        place: "before" if the error is raised before the common pass of two sharded models, and "between" if between
            their forwards; "after" if in the pass of an averager, after that of a sharded model.
    """
    models = [nn.Linear(2, 1, bias=False).double() for _ in range(2)]
    is_averaged = place == "after"
    shards = [un.sharding.ShardedModel(model, comm) for model in models[: 1 if is_averaged else 2]]
    averagers = [un.GradientAverager(model, comm) for model in models[len(shards) :]]
    zeroed = [shard.optimizer(torch.optim.SGD, lr=0.1, elementwise=True) for shard in shards] + models[len(shards) :]

    def step(error_at: str) -> None:
        terms = []
        for model, at in zip(models, ("between", "before"), strict=True):
            terms.append(loss64(model, 1.0 + comm.rank))
            if at == error_at:
                raise KeyError
        if error_at == "after":
            terms[1].register_hook(raises)
        for term in terms if averagers else [terms[0] + terms[1]]:
            term.backward()

    def attempt(number: int) -> bool:
        for one in zeroed:
            one.zero_grad()
        try:
            step(place if number == 0 and comm.rank == 1 else "")
        except (KeyError, un.errors.AbortedError):
            return False
        return True

    assert any(map(attempt, range(5)))
    norms = [shard.clip_grad_norm_(1e9).item() for shard in shards]
    norms += [model.weight.grad.norm().item() for model in models[len(shards) :]]  # type: ignore[union-attr]
    return [norm == pytest.approx((1 + comm.size) / 2 * 2**0.5) for norm in norms]


def loss64(model: nn.Linear, factor: float) -> torch.Tensor:
    loss: torch.Tensor = model(torch.full((1, 2), factor, dtype=torch.float64)).sum()
    return loss


def raises(_: torch.Tensor) -> None:
    raise KeyError


ANEW = [
    pytest.param(place, backend, size, marks=[] if (backend, size) == ("thread", 2) else pytest.mark.soak)
    for place in ("before", "between", "after")
    for backend in ("thread", "shm", "tcp", "gloo")
    for size in (2, 3)
]


@pytest.mark.parametrize(("place", "backend", "size"), ANEW)
def test_a_step_that_one_rank_begins_anew_is_ended_soon_and_repeated(
    place: str, backend: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.utils.pass_watch._EVERY_S", 0.05)
    assert un.launch(begins_anew, size, backend, timeout=WAIT_S, args=(place,)) == [[True, True]] * size


def removed(comm: un.Communicator) -> tuple[int, int]:
    """Return the numbers of threads that watch a pass: with two models, and when one of them was removed."""
    found: list[int] = []

    def count(_: torch.Tensor) -> None:
        names = [thread.name for thread in threading.enumerate()]
        found.append(names.count("unisono-pass-watch"))

    models, averagers = averaged(comm)
    models[0].weight.register_hook(count)
    loss(models[0], 1.0).backward()
    averagers.pop().remove()
    for thread in threading.enumerate():
        # It was told to end with its pass, and may not have been given the time.
        if thread.name == "unisono-pass-watch":
            thread.join()
    loss(models[0], 1.0).backward()
    return found[0], found[1]


def test_a_single_averager_has_no_thread() -> None:
    assert un.launch(removed, 2, "shm") == [(1, 0), (1, 0)]


def lost(comm: un.Communicator) -> float:
    """An optimizer that was dropped without `remove` leaves nothing to watch."""
    un.sharding.ShardedOptimizer(torch.optim.SGD, nn.Linear(2, 1), comm, shard_gradients=True, lr=0.1, elementwise=True)
    gc.collect()
    models, _ = averaged(comm, 1)
    loss(models[0], 1.0 + comm.rank).backward()
    return models[0].weight.grad[0, 0].item()  # type: ignore[index]


def test_dropped_optimizers_are_forgotten() -> None:
    assert pool("thread", 2).run(lost) == [1.5, 1.5]


def test_announcement_reaches_every_model_although_one_is_dropped_meanwhile() -> None:
    class Comms:
        def __init__(self, comm: un.Communicator) -> None:
            self.base = comm

    def program(comm: un.Communicator) -> list[str]:
        watches = {name: PassWatch(name, Comms(comm)) for name in "abcd"}
        reached: list[str] = []
        announces = watches.pop("d")
        for name in "bc":
            watches[name].on_pass = lambda number, name=name: reached.append(name)  # type: ignore[misc]
        watches["a"].on_pass = lambda number: watches.pop("a") and None  # type: ignore[func-returns-value]
        announces.announce(0)
        return reached

    assert un.launch(program, 1, "thread") == [["b", "c"]]
