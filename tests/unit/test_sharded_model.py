"""ShardedModel: equal to one process with all ranks' samples, whatever the model does; and never read while freed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from live_storages import LiveStorages
from sharded_models import MODELS, Transformer, batch, loss_of, made, trained
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import unisono as un
from unisono.sharding import ShardedModel
from unisono.testing import pool

STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    # Running statistics are of the samples of one rank.
    far = {k: (found[k] - v).abs().max().item() for k, v in wanted.items() if v.numel() and k not in STATISTICS}
    far = {k: v for k, v in far.items() if v > 1e-12}
    assert not far, far
    return True


def worlds() -> list[Any]:
    """Return each model with 1, 2 and 3 ranks: all but a few of several ranks are long."""
    short = {("transformer", 3), ("odd", 2)}
    return [
        pytest.param(name, ranks, marks=() if ranks == 1 or (name, ranks) in short else pytest.mark.soak)
        for name in MODELS
        for ranks in (1, 2, 3)
    ]


@pytest.mark.parametrize(("name", "ranks"), worlds())
def test_training_equals_that_of_one_process(name: str, ranks: int) -> None:
    def program(comm: un.Communicator) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = made(name)
        before = list(model.parameters())
        strides = [p.stride() for p in before]
        sharded = ShardedModel(model, comm)
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.01, eps=1e-3)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, step))
            loss.backward()
            sharded.clip_grad_norm_(0.5)
            optimizer.step()
            losses.append(sum(comm.all_gather_object(loss.item())) / comm.size)
        sharded.remove()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert [p.stride() for p in model.parameters()] == strides
        return losses, model.state_dict()

    losses, wanted = trained(name, ranks)
    for found_losses, found in un.launch(program, ranks, "sim"):
        assert torch.allclose(torch.tensor(found_losses), torch.tensor(losses), rtol=1e-12, atol=0)
        assert close(found, wanted)


def test_memory_by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(call: Any) -> Any:
        def without_mode(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return call(*args, **options)

        return without_mode

    # A transport of threads holds tensors of other ranks.
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast"):
        monkeypatch.setattr(un.Communicator, name, unseen(getattr(un.Communicator, name)))

    def program(comm: un.Communicator) -> list[float]:
        model = Transformer(width=64, depth=4, words=60)
        n, u = (sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
        r, w, p = n - 4 * u, 4 * 64 * 64, comm.size
        words = torch.zeros(1, 1, dtype=torch.int64)
        with LiveStorages(model.parameters()) as live:
            sharded = ShardedModel(model, comm)
            ratios = [live.now() / 4 / (n / p)]
            optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
            for _ in range(2):
                live.restart()
                loss = model(words).sum()
                ratios.append(live.peak / 4 / (n / p + r + u))
                live.restart()
                loss.backward()
                ratios.append(live.peak / 4 / (2 * n / p + (2 - 1 / p) * (r + u) + 2 * w))
                optimizer.step()
                optimizer.zero_grad()
            del loss
            ratios.append(live.now() / 4 / (n / p))
        return ratios

    for ranks in (1, 2, 4):
        for ratios in un.launch(program, ranks, "thread"):
            assert all(0.95 < ratio < 1.05 for ratio in ratios), ratios


def simple(comm: un.Communicator, **options: Any) -> tuple[nn.Module, ShardedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    sharded = ShardedModel(model, comm, **options)
    return model, sharded, sharded.optimizer(torch.optim.SGD, lr=0.5)


def on_two(program: Any, backend: str = "sim") -> list[Any]:
    return un.launch(program, 2, backend)


ACTIONS: dict[str, Any] = {
    "sum": lambda model: model[0].weight.sum(),
    "linear": lambda model: nn.functional.linear(torch.ones(1, 3), model[0].weight),
    "stack": lambda model: torch.stack([p.flatten()[0] for p in model.parameters()]),
    "data": lambda model: model[0].weight.data,
    "numpy": lambda model: model[0].weight.detach().numpy(),
    "state_dict": lambda model: model.state_dict(),
    "to": lambda model: model.to(torch.float64),
    "share_memory": lambda model: model.share_memory(),
    "item": lambda model: float(model[3].bias),
    "grad": lambda model: model[0].weight.grad,
    "zero_grad": lambda model: model.zero_grad(),
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "torch optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_freed_parameter_is_not_read(action: str, when: str) -> None:
    def program(comm: un.Communicator) -> str:
        model, _, optimizer = simple(comm)
        if when == "after":
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        weight = model[0].weight
        assert (weight.shape, weight.dtype, weight.requires_grad, weight.numel()) == ((4, 3), torch.float32, True, 12)
        with pytest.raises(RuntimeError) as caught:
            ACTIONS[action](model)
        return str(caught.value)

    for message in un.launch(program, 1, "thread"):
        assert "its model is sharded" in message
        assert "'0.weight'" in message or "'3.bias'" in message


def test_ranks_that_use_other_units_or_parameters_raise() -> None:
    def program(comm: un.Communicator) -> list[str]:
        model, _, _ = simple(comm)
        caught = []
        for modules in ([model[0], model[1 + comm.rank], model[3]], [model[0], model[3]] if comm.rank else [model[0]]):
            with pytest.raises(un.CommError) as error:
                nn.Sequential(*modules)(torch.ones(1, 3)).sum().backward()
            caught.append(type(error.value).__name__)
        for p in (model[1].weight, model[2].weight):
            p.requires_grad_(p is model[1].weight or comm.rank == 0)
        with pytest.raises(un.errors.MismatchError, match=r"only some ranks have a gradient of '2.weight'"):
            model(torch.ones(1, 3)).sum().backward()
        return caught

    assert all("MismatchError" in caught[0] for caught in on_two(program))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_on_one_rank_ends_on_all(where: str) -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, _ = simple(comm)
        failing = comm.rank == 1

        def fail(*_: Any) -> None:
            if failing:
                raise KeyError("data")

        model[2].register_forward_hook(
            lambda _m, _given, out: fail() if where == "forward" else out.register_hook(fail) and None
        )
        x = torch.full((1, 3), 1.0 + comm.rank)
        with pytest.raises(KeyError if failing else un.errors.AbortedError):
            model(x).sum().backward()
        assert all(type(p).__name__ == "FreedParameter" for p in model.parameters())
        failing = False
        model(x).sum().backward()
        found = sharded.clip_grad_norm_(1e9)
        _, again, _ = simple(comm)
        again._model(x).sum().backward()
        return torch.equal(found, again.clip_grad_norm_(1e9))

    assert on_two(program) == [True, True]


def test_ranks_with_other_options_raise() -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, optimizer = simple(comm)
        kept = [shard.local.clone() for shard in sharded.state_dict().values()]
        other = sharded.optimizer(torch.optim.Adam if comm.rank else torch.optim.SGD, lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        optimizer.param_groups[0]["lr"] += comm.rank
        with pytest.raises(RuntimeError, match="GradScaler finds no infinity"):
            scaler.step(optimizer)
        for wrong in (optimizer, other):
            with pytest.raises(un.errors.MismatchError, match="options of group 0 are"):
                wrong.step()
        same = [torch.equal(shard.local, old) for shard, old in zip(sharded.state_dict().values(), kept, strict=True)]
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        return all(same)

    assert on_two(program) == [True, True]


def test_averager_and_sharded_model_refuse_each_other() -> None:
    def program(comm: un.Communicator) -> list[str]:
        model = nn.Linear(2, 1)
        caught = []
        averager = un.GradientAverager(model, comm)
        with pytest.raises(ValueError, match="averaged by another GradientAverager") as error:
            ShardedModel(model, comm)
        caught.append(str(error.value))
        averager.remove()
        sharded = ShardedModel(model, comm)
        for make in (un.GradientAverager, ShardedModel):
            with pytest.raises(ValueError, match="sharded by another ShardedModel"):
                make(model, comm)
        sharded.remove()
        un.GradientAverager(model, comm).remove()
        return caught

    assert len(on_two(program)) == 2


def test_full_parameters_and_states() -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, optimizer = simple(comm)
        wanted = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).state_dict()
        sharded.load_state_dict(wanted)
        with sharded.full_parameters(writeback=False):
            same = all(torch.equal(v, wanted[k]) for k, v in model.state_dict().items())
            assert torch.isfinite(model(torch.ones(1, 3))).all()
            model[0].weight.data.zero_()
            with pytest.raises(RuntimeError, match="inside a forward, a backward or full_parameters"):
                optimizer.step()
        with sharded.full_parameters():
            same &= torch.equal(model[0].weight, wanted["0.weight"])
            model[0].weight.data.fill_(2.0)
        with sharded.full_parameters():
            same &= bool((model[0].weight == 2.0).all())
        state = sharded.state_dict()
        sharded.load_state_dict(state)
        with pytest.raises(ValueError, match=r"lacks \['0.weight'\]"):
            sharded.load_state_dict({k: v for k, v in state.items() if k != "0.weight"})
        with pytest.raises(ValueError, match=r"'0.weight' is \[2\] in the state"):
            sharded.load_state_dict({**state, "0.weight": torch.ones(2)})
        return same

    assert on_two(program) == [True, True]


def test_gradients_of_no_sync_and_changes_between_passes() -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, optimizer = simple(comm)
        x = torch.full((1, 3), 1.0 + comm.rank)
        model(x).sum().backward(retain_graph=False)
        once = sharded.clip_grad_norm_(1e9)
        optimizer.zero_grad()
        with sharded.no_sync():
            model(x).sum().backward()
        with pytest.raises(RuntimeError, match="inside no_sync"):
            optimizer.step()
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        twice = sharded.clip_grad_norm_(1e9)
        late = model(x).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
            late.backward()
        with torch.no_grad():
            model(x)
        return torch.allclose(2 * once, twice) and type(model[0].weight) is not nn.Parameter

    assert on_two(program) == [True, True]


def test_mixed_precision_keeps_parts_and_states_in_the_first_dtype() -> None:
    def program(comm: un.Communicator) -> tuple[list[torch.dtype], bool]:
        model, sharded, optimizer = simple(comm, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        seen = model(torch.ones(1, 3, dtype=torch.bfloat16))
        seen.sum().backward()
        optimizer.step()
        part = optimizer.param_groups[0]["params"][0]
        with sharded.full_parameters():
            whole = model[0].weight.dtype
        again = model(torch.ones(1, 3, dtype=torch.bfloat16))
        again.sum().backward()
        moved = not torch.equal(seen, again)
        sharded.remove()
        return [seen.dtype, part.dtype, part.grad.dtype, whole, model[0].weight.dtype], moved

    for dtypes, moved in on_two(program):
        assert dtypes == [torch.bfloat16, *[torch.float32] * 4]
        assert moved


@pytest.mark.parametrize(
    ("model", "options", "error", "match"),
    [
        (nn.ReLU(), {}, ValueError, "no parameters"),
        ([nn.Parameter(torch.ones(1))], {}, TypeError, "must be a module"),
        (nn.LazyLinear(2), {}, ValueError, "uninitialized"),
        (nn.Linear(1, 1), {"units": [nn.Conv1d]}, ValueError, "no module of the model is a unit"),
    ],
)
def test_unfit_models(model: Any, options: dict[str, Any], error: type[Exception], match: str) -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(error, match=match):
            ShardedModel(model, comm, **options)

    un.launch(program, 1, "thread")


def test_processes_and_memory_of_reductions_over_gloo() -> None:
    def program(comm: un.Communicator) -> int:
        kept = []
        for _ in range(8):
            whole = torch.ones(2 * comm.size)
            kept.append(weakref.ref(whole.untyped_storage()))
            whole = whole.clone()
            kept.append(weakref.ref(whole))
            comm.reduce_scatter_single(torch.empty(2), whole)
        del whole
        return sum(each() is not None for each in kept)

    assert max(pool("gloo", 2).run(program)) <= 1


@pytest.mark.soak
def test_torch_compile_of_the_model_raises() -> None:
    def program(comm: un.Communicator) -> None:
        model, _, _ = simple(comm)
        with pytest.raises(RuntimeError, match=r"torch.compile cannot trace a ShardedModel's hooks"):
            torch.compile(model, backend="eager")(torch.ones(1, 3))

    un.launch(program, 1, "thread")
