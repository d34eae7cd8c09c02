"""ShardedOptimizer refuses what it would compute wrongly, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_optimizers import BOTH, STEPS, loss_of, make_model, shard, train, values, whole
from torch import nn
from torch.optim import SGD

import unisono as un
from unisono.errors import AbortedError, CommError, MismatchError
from unisono.testing import run_ranks


def on_two(program: Callable[..., object], *args: object) -> None:
    un.launch(program, 2, "thread", args, timeout=20)


def test_gradients_that_were_not_averaged_are_an_error() -> None:
    def program(comm: Any) -> None:
        model = make_model()
        optimizer = un.sharding.ShardedOptimizer(SGD, model, comm, lr=0.1)
        before = values(model)
        loss_of(model, 0, comm.rank).backward()
        with pytest.raises(
            MismatchError, match=r"in 'gradients \(average them before step\(\), by un.GradientAverager"
        ):
            optimizer.step()
        assert all(map(torch.equal, values(model), before))
        un.average_gradients(model, comm)
        optimizer.step()

    on_two(program)


@BOTH
def test_ranks_that_would_step_differently_are_an_error(sharded: bool) -> None:
    def program(comm: Any) -> None:
        model = make_model()
        parts = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        made = un.sharding.ShardedOptimizer(SGD, parts, comm, shard_gradients=sharded, lr=0.1)
        (parts[comm.rank] if comm.rank else parts[0] + parts[1]).sum().backward()
        with pytest.raises(MismatchError, match=r"a gradient', at \['parameter 0'\]: rank 0: True; rank 1: False"):
            made.step()
        optimizer = shard(comm, model, sharded=sharded, lr=0.1)
        loss_of(model, 0, 0).backward()
        optimizer.param_groups[0]["lr"] = 0.1 + comm.rank
        with pytest.raises(
            MismatchError, match=r"options of the groups', at \[0\]\['lr'\]: rank 0: '0.1'; rank 1: '1.1'"
        ):
            optimizer.step()

    on_two(program)


def test_a_pass_that_raises_drops_the_step_on_all_ranks() -> None:
    def program(comm: Any) -> list[torch.Tensor]:
        model = make_model()
        optimizer = shard(comm, model, sharded=True, lr=0.1)

        def explode(_: torch.Tensor) -> None:
            raise ArithmeticError("user's hook")

        with optimizer.no_sync():
            loss_of(model, 70, comm.rank).backward()
        handle = model[0].weight.register_hook(explode) if comm.rank == 1 else None

        def step() -> None:
            loss_of(model, 71, comm.rank).backward()
            optimizer.step()

        with pytest.raises(ArithmeticError if handle else AbortedError):
            step()
        if handle:
            handle.remove()
        return train(model, optimizer, comm.rank)

    model, _ = whole(2, SGD, lr=0.1)
    for found in un.launch(program, 2, "thread", timeout=20):
        torch.testing.assert_close(found, values(model), rtol=0, atol=1e-12)


def test_classes_that_look_at_whole_tensors_are_refused() -> None:
    class Normed(SGD):
        """Scales the step by the norm of each parameter, as LARS does."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(p.detach().norm())
            return super().step(closure)

    def program(comm: Any) -> None:
        # Muon came with torch 2.9.
        muon = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
        with pytest.raises(ValueError, match=r"LBFGS.step\(\) needs a closure"):
            un.sharding.ShardedOptimizer(torch.optim.LBFGS, make_model(), comm, lr=0.1)
        for cls in (torch.optim.Adafactor, *muon, torch.optim.SparseAdam, Normed):
            with pytest.raises(ValueError, match=f"{cls.__name__} .*pass elementwise=True"):
                un.sharding.ShardedOptimizer(cls, make_model(), comm, lr=0.1)
        un.sharding.ShardedOptimizer(Normed, make_model(), comm, elementwise=True, lr=0.0)

    un.launch(program, 1, "thread")


def test_misuse_is_one_error() -> None:
    def program(comm: Any) -> None:
        averaged = make_model()
        un.GradientAverager(averaged, comm)
        with pytest.raises(ValueError, match="averaged by another GradientAverager"):
            shard(comm, averaged, sharded=True)
        model = make_model()
        optimizer = shard(comm, model, sharded=True, lr=0.1)
        with pytest.raises(ValueError, match="sharded by another ShardedOptimizer"):
            un.GradientAverager(model, comm)
        tied = nn.Parameter(torch.ones(4))
        with pytest.raises(ValueError, match="share memory"):
            un.sharding.ShardedOptimizer(SGD, [tied, nn.Parameter(tied.detach()[1:])], comm)
        with pytest.raises(ValueError, match="twice"):
            un.sharding.ShardedOptimizer(SGD, [tied, tied], comm)
        with pytest.raises(ValueError, match="no parameters"):
            un.sharding.ShardedOptimizer(SGD, [], comm)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 0, 0)).backward()
        for use in (scaler.step, lambda _: nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            with pytest.raises(RuntimeError, match=r"uses p\.grad, which is sharded"):
                use(optimizer)
        optimizer.zero_grad()
        model.float()
        with pytest.raises(RuntimeError, match="was given other memory"):
            optimizer.step()
        optimizer.remove()
        un.GradientAverager(model, comm)

    on_two(program)


def test_sharded_gradients_come_from_backward_only() -> None:
    def program(comm: Any) -> None:
        model = make_model()
        optimizer = shard(comm, model, sharded=True, lr=0.1)
        with pytest.raises(ValueError, match="none can be zeroed"):
            optimizer.zero_grad(set_to_none=False)
        loss_of(model, 0, 0).backward()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        for use in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match=r"p.grad of '0.weight' was set"):
                use()

    on_two(program)


def test_gradient_of_the_callers_is_not_lost() -> None:
    """Memory for gradients cannot be filled, because each rank has a part of them."""

    def program(comm: Any) -> None:
        model = make_model()
        optimizer = shard(comm, model, sharded=True, lr=0.1)
        if comm.rank == 0:
            model[0].weight.grad = torch.zeros_like(model[0].weight)

        def step() -> None:
            loss_of(model, 0, 0).backward()
            optimizer.step()

        if comm.rank == 0:
            with pytest.raises(RuntimeError, match=r"p.grad of '0.weight' was set"):
                step()
        else:
            with pytest.raises(CommError, match="rank 0"):
                step()

    on_two(program)


def test_scaled_losses_with_whole_gradients() -> None:
    def program(comm: Any) -> list[torch.Tensor]:
        model = make_model()
        optimizer = shard(comm, model, sharded=False, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, comm.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
        return values(model)

    model, _ = whole(2, SGD, lr=0.1)
    torch.testing.assert_close(un.launch(program, 2, "thread")[0], values(model), rtol=0, atol=1e-7)


def test_unfrozen_parameters() -> None:
    def program(comm: Any) -> None:
        w = nn.Parameter(torch.ones(3), requires_grad=False)
        v = nn.Parameter(torch.ones(3))
        optimizer = un.sharding.ShardedOptimizer(SGD, [w, v], comm, shard_gradients=True, lr=0.1)
        w.requires_grad_()
        (w * v).sum().backward()
        with pytest.raises(RuntimeError, match="'parameter 0' was frozen"):
            optimizer.step()

    on_two(program)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", ["replaced", "added", "assigned"])
def test_parameters_that_are_not_updated_are_named(how: str, sharded: bool) -> None:
    def program(comm: un.Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        optimizer = un.sharding.ShardedOptimizer(SGD, model, comm, shard_gradients=sharded, lr=0.1)
        model.append(nn.Linear(2, 2).requires_grad_(False))
        if comm.rank == 0 and how == "replaced":
            model[0].weight = nn.Parameter(torch.ones(2, 2))
        if comm.rank == 0 and how == "added":
            model.append(nn.Linear(2, 2))
        if comm.rank == 0 and how == "assigned":
            model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    first, second = run_ranks(program, 2, on_failure="continue")
    assert isinstance(first, RuntimeError)
    assert "later, so its gradient is not averaged. Call remove() on the optimizer" in str(first)
    assert isinstance(second, CommError)


def test_one_that_could_not_be_created_claims_nothing() -> None:
    class Normed(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data -= p.grad / p.grad.norm()

    def program(comm: un.Communicator) -> None:
        model = nn.Linear(4, 3)
        try:
            shard(comm, model, Normed, sharded=True, elementwise=False, lr=0.1)
        except ValueError:
            # The traceback keeps the first one alive.
            shard(comm, model, sharded=True, lr=0.1)
        else:
            pytest.fail("it was not refused")

    run_ranks(program, 2)


def test_buffers_that_cannot_be_broadcast() -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = nn.Linear(2, 1)
        model.register_buffer("mask", torch.eye(2).to_sparse())
        with pytest.raises(ValueError, match=r"'mask' \(which init_sync=False does not broadcast\)"):
            shard(comm, model, sharded=True, lr=0.1)
        nn.init.constant_(model.weight, float(comm.rank))
        optimizer = shard(comm, model, sharded=True, lr=0.5, init_sync=False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.flatten().tolist()

    # Each rank has updated its own part of what it had.
    assert run_ranks(program, 2)[0][0] == -0.5
