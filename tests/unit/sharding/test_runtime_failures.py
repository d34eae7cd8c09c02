"""Sharded training after an error on one rank: no step counts on some ranks only; and what cannot be copied."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
import torch
from failing_posts import FailedPostError, Posts, run_failing
from pairwise import short
from torch import nn
from torch.optim import SGD

import unisono as un
from unisono.errors import AbortedError, CommError, MismatchError
from unisono.sharding import ShardedModel, ShardedOptimizer
from unisono.testing import pool

SEEDS = range(3)


def layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    # Ranks that are threads share torch's generator.
    for p in model.parameters():
        p.data = torch.linspace(-0.5, 0.6, p.numel(), dtype=torch.float64).view(p.shape)
    return model


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.full((1, 3), 1.0 + rank + 2 * number, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum() / 100


def averaged_already(_comm: un.Communicator, model: nn.Module) -> Any:
    return SGD(model.parameters(), lr=0.1)


def averaged(comm: un.Communicator, model: nn.Module) -> Any:
    un.GradientAverager(model, comm)
    return averaged_already(comm, model)


def zero_1(comm: un.Communicator, model: nn.Module) -> Any:
    un.GradientAverager(model, comm)
    return ShardedOptimizer(SGD, model, comm, lr=0.1, elementwise=True)


def zero_2(comm: un.Communicator, model: nn.Module) -> Any:
    return ShardedOptimizer(SGD, model, comm, shard_gradients=True, lr=0.1, elementwise=True)


def zero_3(comm: un.Communicator, model: nn.Module) -> Any:
    return ShardedModel(model, comm).optimizer(SGD, lr=0.1, elementwise=True)


def fail_on(rank: int, comm: un.Communicator) -> None:
    if comm.rank == rank:
        raise KeyError("sample")


@short("way, seed", product([zero_2, zero_3], SEEDS), [(zero_2, 0), (zero_3, 0), (zero_3, 1)])
def test_a_failed_pass_cuts_off_no_step_before_it(way: Callable[..., Any], seed: int) -> None:
    def program(comm: un.Communicator) -> None:
        model = layers()
        optimizer = way(comm, model)
        loss_of(model, batch(comm.rank, 0)).backward()
        # Rank 1 may be in its next pass already while rank 0 is in here.
        optimizer.step()
        if way is zero_2:
            model[0].register_forward_hook(lambda _m, _x, out: out.register_hook(lambda _: fail_on(1, comm)) and None)
        else:
            # Before any unit is gathered, for which rank 1 would wait for rank 0.
            model.register_forward_pre_hook(lambda *_: fail_on(1, comm))

        def goes_on() -> None:
            loss_of(model, batch(comm.rank, 1)).backward()
            optimizer.step()

        with pytest.raises(KeyError if comm.rank == 1 else AbortedError):
            goes_on()

    un.launch(program, 2, "sim", seed=seed)


@short("failing, rank, seed", product(range(3), range(3), range(3)), [(0, 1, 0), (2, 1, 0)])
def test_a_common_pass_of_several_optimizers_is_repeated(failing: int, rank: int, seed: int) -> None:
    """Ranks add up the terms of the loss in another order, and reach another part of the models before the failure."""

    def program(comm: un.Communicator) -> list[bool]:
        models = [layers() for _ in range(3)]
        options = {"shard_gradients": True, "bucket_cap_mb": 1e-5, "lr": 0.1}
        optimizers = [ShardedOptimizer(SGD, model, comm, elementwise=True, **options) for model in models]

        def loss(number: int, *, fails: bool) -> torch.Tensor:
            out = models[number](batch(comm.rank, number))
            if fails and number == failing:
                out.register_hook(lambda _: fail_on(rank, comm))
            return (out**2).sum() / 100

        def attempt(number: int) -> bool:
            order = [(comm.rank + i) % 3 for i in range(3)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            try:
                with ExitStack() as stack:
                    for optimizer in optimizers:
                        stack.enter_context(optimizer.no_sync())
                    torch.stack([loss(i, fails=False) for i in order]).sum().backward()
                torch.stack([loss(i, fails=number == 0) for i in order]).sum().backward()
            except (KeyError, AbortedError):
                return False
            return True

        assert any(map(attempt, range(5)))
        for optimizer in optimizers:
            optimizer.step()
        right = layers()
        (sum(loss_of(right, batch(r, failing)) for r in range(3)) * 2 / 3).backward()  # type: ignore[union-attr]
        SGD(right.parameters(), lr=0.1).step()
        return [torch.allclose(p, q) for p, q in zip(models[failing].parameters(), right.parameters(), strict=True)]

    assert un.launch(program, 3, "sim", seed=seed) == [[True] * 4] * 3


def repeat_common_pass(comm: un.Communicator, ways: str, failing: int, rank: int, unused: int | None) -> list[bool]:
    """Return for each model whether it has the loss of one process after a step whose first pass has failed.

    No rank raises anything but the error, and `AbortedError`s that name a rank.

    Args:
        comm: All ranks. Each adds up the terms of the common loss in another order.
        ways: A letter for each model: "a" if it is averaged, 2 or 3 for its stage of ZeRO.
        failing: The model in whose part of the pass the error is raised, before its gradients are complete.
        rank: The rank that raises it.
        unused: The rank that does not use the first layer of averaged models.
    """
    options: Any = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5, "find_unused_parameters": True}
    models = [layers() for _ in ways]
    optimizers: list[Any] = []
    for way, model in zip(ways, models, strict=True):
        if way == "a":
            un.GradientAverager(model, comm, **options)
        optimizers.append({"a": averaged_already, "2": zero_2, "3": zero_3}[way](comm, model))

    def loss(model: nn.Sequential, number: int, at: int, *, fails: bool = False) -> torch.Tensor:
        if ways[number] == "3":
            hidden = out = model(batch(at, number))
        else:
            hidden = model[0](batch(at, number))
            out = model[1](hidden.detach() if ways[number] == "a" and at == unused else hidden)
        if fails:
            hidden.register_hook(lambda _: fail_on(rank, comm))
        return (out**2).sum() / 100

    def attempt(number: int) -> bool:
        order = [(comm.rank + i) % len(ways) for i in range(len(ways))]
        try:
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [loss(models[i], i, comm.rank, fails=i == failing and number == 0) for i in order]
            torch.stack(losses).sum().backward()
        except (KeyError, AbortedError):
            return False
        return True

    assert any(map(attempt, range(5)))
    right = [layers() for _ in ways]
    for number, optimizer in enumerate(optimizers):
        optimizer.step()
        torch.stack([loss(right[number], number, at) / comm.size for at in range(comm.size)]).sum().backward()
        SGD(right[number].parameters(), lr=0.1).step()
    return [torch.allclose(loss(models[i], i, 0), loss(right[i], i, 0)) for i in range(len(ways))]


MIXED = [
    (ways, failing, rank, seed)
    for ways in ("a2", "2a", "2a2", "a3", "3a", "23", "32", "a23", "232", "3a2")
    for failing in range(len(ways))
    for rank in range(3)
    for seed in range(3)
]


@short("ways, failing, rank, seed", MIXED, [("a2", 0, 0, 0), ("a2", 1, 1, 0), ("a3", 0, 1, 0), ("23", 0, 0, 0)])
def test_a_common_pass_of_an_averager_and_sharded_models_is_repeated(
    ways: str, failing: int, rank: int, seed: int
) -> None:
    """An averager waits for the rank that has failed, which would wait in a sharded model.

    That rank may fail before its pass has reached a sharded model, in which the others are already.
    """
    found = un.launch(repeat_common_pass, 3, "sim", seed=seed, args=(ways, failing, rank, None))
    assert found == [[True] * len(ways)] * 3


BEFORE = [
    (backend, size, ways, failing)
    for backend in ("thread", "shm", "tcp", "gloo")
    for size in (2, 3)
    for ways in ("a3", "3a", "23", "32", "a23")
    for failing in range(len(ways))
]


@short("backend, size, ways, failing", BEFORE, [("thread", 2, "a3", 0), ("thread", 3, "23", 0)])
def test_a_common_pass_that_fails_before_a_sharded_model_is_repeated(
    backend: str, size: int, ways: str, failing: int
) -> None:
    found = pool(backend, size, timeout=60).run(repeat_common_pass, ways, failing, size - 1, None)
    assert found == [[True] * len(ways)] * size


def test_a_rank_that_fails_before_its_pass_reaches_a_sharded_model_is_named() -> None:
    def program(comm: un.Communicator) -> None:
        other, model = layers(), layers()
        un.GradientAverager(other, comm)
        ShardedModel(model, comm)
        terms = [loss_of(other, batch(comm.rank, 0)), loss_of(model, batch(comm.rank, 0))]
        total = terms[comm.rank % 2] + terms[1 - comm.rank % 2]
        next(other.parameters()).register_post_accumulate_grad_hook(lambda _: fail_on(1, comm))
        with pytest.raises(
            KeyError if comm.rank == 1 else AbortedError, match="sample" if comm.rank == 1 else "rank 1"
        ):
            total.backward()

    un.launch(program, 3, "thread", timeout=20)


WAYS = {"a": averaged, "1": zero_1, "2": zero_2, "3": zero_3}


def makes_step(comm: un.Communicator, model: nn.Module, optimizer: Any, number: int) -> bool:
    """Make a step, and return whether it leads to the loss of one process with the batches of all ranks."""
    optimizer.step()
    right = layers()
    torch.stack([loss_of(right, batch(rank, number)) / comm.size for rank in range(comm.size)]).sum().backward()
    SGD(right.parameters(), lr=0.1).step()
    return torch.allclose(loss_of(model, batch(0, number)), loss_of(right, batch(0, number)))


def schedule(order: str, count: int) -> list[tuple[str, int]]:
    """Return the forward and backward passes of a step in their order, each with the number of its model."""
    forwards, backwards = ([(kind, number) for number in range(count)] for kind in ("forward", "backward"))
    if order == "fb":
        return [each for pair in zip(forwards, backwards, strict=True) for each in pair]
    return forwards + (backwards if order == "ffbb" else backwards[::-1])


def repeat_separate_passes(
    comm: un.Communicator, ways: str, order: str, failing: int, late: Sequence[threading.Event]
) -> list[bool]:
    """Return for each model whether it has the loss of one process after a step that rank 1 began anew.

    Rank 1's error is raised before its pass through a model, in which the other ranks wait for it. Its repetition of
    the step then waits for them in another model, or differs from what they do in this one.

    Args:
        comm: All ranks.
        ways: A letter for each model: "a" if it is averaged, a number for its stage of ZeRO.
        order: "ffbb" if all forwards come before all backward passes, "fb" if each model's pass follows its forward,
            "ffbbr" if the passes run in the reverse order of the forwards.
        failing: The model before whose pass the error is raised.
        late: If given, rank 2 begins that model's pass only after ranks 0 and 1 have been released from each other.
    """
    models = [layers() for _ in ways]
    optimizers = [WAYS[way](comm, model) for way, model in zip(ways, models, strict=True)]

    def step(*, first: bool) -> None:
        losses: list[torch.Tensor] = []
        for each in schedule(order, len(ways)):
            if first and each == ("backward", failing):
                fail_on(1, comm)
                assert comm.rank != 2 or all(event.wait(60) for event in late)
            if each[0] == "forward":
                losses.append(loss_of(models[each[1]], batch(comm.rank, each[1])))
            else:
                losses[each[1]].backward()

    def attempt(number: int) -> bool:
        for optimizer in optimizers:
            optimizer.zero_grad()
        try:
            step(first=number == 0)
        except KeyError:
            return False
        except (AbortedError, MismatchError):
            # Mismatches are those of a ZeRO-3 model, in which one rank begins a forward, and others are in a pass.
            for event in late[comm.rank : comm.rank + 1]:
                event.set()
            return False
        return True

    # Rank 1 has its own error, and all ranks have the one that ends their wait for each other. The first repetition
    # after it succeeds, unless a rank has missed it.
    assert any(map(attempt, range(5 if late else 3)))
    return [makes_step(comm, *pair, number) for number, pair in enumerate(zip(models, optimizers, strict=True))]


SEPARATE = [
    (backend, ways, order, failing)
    for backend in ("thread", "shm", "tcp", "gloo")
    for ways in ("23", "32", "22", "a2", "2a", "a3", "3a", "12", "21", "13", "31", "33", "aa", "232", "a23")
    for order in ("ffbb", "fb", "ffbbr")
    for failing in range(len(ways))
]
FEW = [("thread", "23", "ffbb", 0), ("thread", "22", "fb", 1), ("thread", "a2", "fb", 1), ("thread", "33", "ffbb", 1)]


@short("backend, ways, order, failing", SEPARATE, FEW)
def test_separate_passes_are_repeated_after_an_error_that_no_other_rank_has_seen(
    backend: str, ways: str, order: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.utils.pass_watch._EVERY_S", 0.05)
    found = pool(backend, 3, timeout=60).run(repeat_separate_passes, ways, order, failing, [])
    assert found == [[True] * len(ways)] * 3


LATE = [("23", 0), ("32", 1), ("22", 1), ("a2", 1), ("2a", 1), ("a3", 0), ("3a", 1), ("13", 0), ("33", 1), ("aa", 1)]


@short("ways, failing", [*LATE, ("a23", 0), ("a23", 1), ("232", 0), ("232", 2)], [("a3", 0), ("aa", 1)])
def test_a_rank_that_misses_a_deadlock_of_the_others_repeats_the_step_with_them(
    ways: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 joins the pass that the others have given up, and would wait for their repetition there."""
    monkeypatch.setattr("unisono.utils.pass_watch._EVERY_S", 0.05)
    late = [threading.Event(), threading.Event()]
    found = un.launch(repeat_separate_passes, 3, "thread", timeout=60, args=(ways, "ffbb", failing, late))
    assert found == [[True] * len(ways)] * 3


@pytest.mark.parametrize("way", [zero_2, zero_3])
def test_other_ranks_hear_why_a_pass_was_refused_on_one_rank(way: Callable[..., Any]) -> None:
    text = {zero_2: r"RuntimeError: p.grad of '0.weight' was set", zero_3: "RuntimeError: parameters were changed"}[way]

    def program(comm: un.Communicator) -> None:
        model = layers()
        sharded = ShardedModel(model, comm) if way is zero_3 else zero_2(comm, model)
        loss = loss_of(model, batch(comm.rank, 0))
        if comm.rank == 1 and way is zero_3:
            sharded.load_state_dict(sharded.state_dict())
        elif comm.rank == 1:
            model[0].weight.grad = torch.ones(4, 3, dtype=torch.float64)
        with pytest.raises(
            RuntimeError if comm.rank == 1 else AbortedError,
            match=text.removeprefix("RuntimeError: ") if comm.rank == 1 else f"rank 1 .* failed there: {text}",
        ):
            loss.backward()

    un.launch(program, 3, "thread", timeout=20)


@short("backend", [("gloo",), ("shm",), ("thread",)], [("gloo",)])
def test_an_averager_sends_no_bucket_that_a_sharded_model_could_cut_off(backend: str) -> None:
    """Rank 1 would send its first bucket at the end of its pass, and the sharded model has ended that before."""
    found = pool(backend, 2, timeout=20).run(repeat_common_pass, "2a", 1, 0, 1)
    assert found == [[True, True]] * 2


def test_a_failed_forward_drops_the_earlier_passes_of_its_step() -> None:
    def program(comm: un.Communicator) -> bool:
        model = layers()
        sharded = ShardedModel(model, comm)
        loss_of(model, batch(comm.rank, 0)).backward()
        handle = model[1].register_forward_hook(lambda *_: fail_on(1, comm))
        with pytest.raises(KeyError if comm.rank == 1 else AbortedError):
            loss_of(model, batch(comm.rank, 1)).backward()
        handle.remove()
        loss_of(model, batch(comm.rank, 2)).backward()
        fresh = layers()
        other = ShardedModel(fresh, comm)
        loss_of(fresh, batch(comm.rank, 2)).backward()
        return torch.equal(sharded.clip_grad_norm_(1e9), other.clip_grad_norm_(1e9))

    assert un.launch(program, 2, "thread", timeout=20) == [True, True]


def goes_wrong_in_a_later_forward(comm: un.Communicator, model: nn.Module) -> None:
    """Let rank 1's next forward fail before any unit is gathered, and the other ranks begin theirs afterwards."""
    if comm.rank == 1:
        handle = model.register_forward_pre_hook(lambda *_: fail_on(1, comm))
        with pytest.raises(KeyError):
            model(batch(1, 1))
        handle.remove()
    comm.barrier()


def test_a_rank_that_begins_its_pass_after_another_has_failed_hears_that_its_gradients_are_lost() -> None:
    def program(comm: un.Communicator) -> bool:
        model = layers()
        sharded = ShardedModel(model, comm)
        loss_of(model, batch(comm.rank, 0)).backward()
        goes_wrong_in_a_later_forward(comm, model)
        if comm.rank != 1:
            with pytest.raises(AbortedError, match="KeyError"):
                loss_of(model, batch(comm.rank, 1)).backward()
        # All ranks begin the step again.
        loss_of(model, batch(comm.rank, 2)).backward()
        fresh = layers()
        other = ShardedModel(fresh, comm)
        loss_of(fresh, batch(comm.rank, 2)).backward()
        return torch.equal(sharded.clip_grad_norm_(1e9), other.clip_grad_norm_(1e9))

    assert un.launch(program, 3, "thread", timeout=20) == [True, True, True]


@pytest.mark.parametrize("way", ["step", "clip_grad_norm_"])
def test_a_rank_hears_once_that_its_gradients_are_lost(way: str) -> None:
    def program(comm: un.Communicator) -> float:
        model = layers()
        sharded = ShardedModel(model, comm)
        optimizer = sharded.optimizer(SGD, lr=0.1, elementwise=True)
        loss_of(model, batch(comm.rank, 0)).backward()
        goes_wrong_in_a_later_forward(comm, model)
        if comm.rank != 1:
            with pytest.raises(AbortedError, match="KeyError"):
                optimizer.step() if way == "step" else sharded.clip_grad_norm_(1.0)
        loss_of(model, batch(comm.rank, 2)).backward()
        optimizer.step()
        return sharded.clip_grad_norm_(1e9).item()

    assert len(set(un.launch(program, 3, "thread", timeout=20))) == 1


def test_a_rank_that_has_no_gradients_does_not_hear_of_a_failed_forward() -> None:
    def program(comm: un.Communicator) -> float:
        model = layers()
        sharded = ShardedModel(model, comm)
        optimizer = sharded.optimizer(SGD, lr=0.1, elementwise=True)
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        goes_wrong_in_a_later_forward(comm, model)
        loss_of(model, batch(comm.rank, 2)).backward()
        return sharded.clip_grad_norm_(1e9).item()

    assert len(set(un.launch(program, 3, "thread", timeout=20))) == 1


def test_a_model_is_removed_after_a_failed_forward() -> None:
    def program(comm: un.Communicator) -> bool:
        model = layers()
        sharded = ShardedModel(model, comm)
        loss_of(model, batch(comm.rank, 0)).backward()
        goes_wrong_in_a_later_forward(comm, model)
        sharded.remove()
        return all(torch.equal(*pair) for pair in zip(model.parameters(), layers().parameters(), strict=True))

    assert un.launch(program, 3, "thread", timeout=20) == [True, True, True]


def train_after_a_failed_gather(
    comm: un.Communicator, posts: Posts, act: str, gathers: int | None
) -> list[torch.Tensor]:
    """Return the parameters after steps before and after an action in which rank 1 fails behind some gathers."""
    model = layers()
    sharded = ShardedModel(model, comm)
    optimizer = sharded.optimizer(SGD, lr=0.1, elementwise=True)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, number)).backward()
        optimizer.step()
        if number == 0 and gathers is not None:
            if comm.rank == 1:
                posts[1] = gathers
            with pytest.raises(FailedPostError if comm.rank == 1 else CommError), ExitStack() as stack:
                stack.enter_context(sharded.full_parameters()) if act == "full_parameters" else sharded.remove()
    sharded.remove()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("act", ["full_parameters", "remove"])
@pytest.mark.parametrize("gathers", [0, 1])
def test_training_goes_on_after_a_failed_gather_of_the_whole_model(act: str, gathers: int) -> None:
    """The model has two units, so that the second gather fails when the first one has succeeded."""
    found = run_failing(train_after_a_failed_gather, 2, act, gathers)
    wanted = run_failing(train_after_a_failed_gather, 2, act, None)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def skips(comm: un.Communicator, model: nn.Module, optimizer: Any) -> None:
    """Train with two batches of each rank; rank 1 skips batch 1, whose loss raises, and has another one."""
    for number in (0, 1) if comm.rank == 0 else (0, 1, 2):
        optimizer.zero_grad()
        try:
            loss = loss_of(model, batch(comm.rank, number))
            if number == 1:
                fail_on(1, comm)
        except KeyError:
            continue
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("way", [averaged, zero_1, zero_2])
def test_after_a_skipped_batch_passes_are_paired_by_their_number(way: Callable[..., Any]) -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor]:
        model = layers()
        skips(comm, model, way(comm, model))
        return [p.detach().clone() for p in model.parameters()]

    model = layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    for numbers in ((0, 0), (1, 2)):
        optimizer.zero_grad()
        (sum(loss_of(model, batch(rank, number)) for rank, number in enumerate(numbers)) / 2).backward()
        optimizer.step()
    for found in un.launch(program, 2, "thread", timeout=20):
        torch.testing.assert_close(found, list(model.parameters()), rtol=1e-12, atol=1e-12)


def test_a_skipped_backward_of_a_sharded_model_is_an_error_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor]:
        model = layers()
        sharded = ShardedModel(model, comm)
        optimizer = sharded.optimizer(SGD, lr=0.1, elementwise=True)
        with pytest.raises((MismatchError, AbortedError)):
            skips(comm, model, optimizer)
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 3)).backward()
        optimizer.step()
        with sharded.full_parameters():
            return [p.detach().clone() for p in model.parameters()]

    model = layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    for number in (0, 3):
        optimizer.zero_grad()
        (sum(loss_of(model, batch(rank, number)) for rank in range(2)) / 2).backward()
        optimizer.step()
    for found in un.launch(program, 2, "thread", timeout=20):
        torch.testing.assert_close(found, list(model.parameters()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", [zero_1, zero_2, zero_3])
@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps])
def test_optimizers_are_not_copied(way: Callable[..., Any], act: Callable[[Any], object]) -> None:
    with un.init() as comm, pytest.raises(TypeError, match="neither pickled nor copied"):
        act(way(comm, layers()))


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps])
def test_sharded_models_are_not_copied(act: Callable[[Any], object]) -> None:
    with un.init() as comm:
        model = layers()
        sharded = ShardedModel(model, comm)
        with pytest.raises(TypeError, match="neither pickled nor copied"):
            act(sharded)
        with sharded.full_parameters(), pytest.raises(TypeError, match="neither pickled nor copied"):
            act(model)


@pytest.mark.parametrize("way", [zero_1, zero_2, zero_3])
def test_no_optimizer_takes_further_groups(way: Callable[..., Any]) -> None:
    with un.init() as comm:
        optimizer = way(comm, layers())
        with pytest.raises(RuntimeError, match="takes no further groups"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert len(optimizer.param_groups) == 1


def test_ema_of_a_sharded_model_is_taken_while_it_is_whole() -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        sharded = ShardedModel(model, comm)
        for value in (2.0, 6.0):
            with sharded.full_parameters(), torch.no_grad():
                for p in model.parameters():
                    p.fill_(value)
                if value == 2.0:
                    ema = un.utils.EMA(model, 0.75, comm)
                ema.update()
        with pytest.raises(RuntimeError, match="full_parameters"):
            ema.update()
        with sharded.full_parameters(writeback=False), ema.applied():
            return [p.item() for p in model.parameters()]

    assert un.launch(program, 2, "thread", timeout=20) == [[3.0, 3.0]] * 2
