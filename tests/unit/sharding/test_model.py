"""ShardedModel: equal to one process with all ranks' samples, whatever the model does; and what it holds."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from live_storages import LiveStorages
from sharded_models import MODELS, Transformer, batch, loss_of, made, on_two, simple, trained
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
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.01, elementwise=True, eps=1e-3)
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
            optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1, elementwise=True)
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

    for ranks in (1, 2):
        for ratios in un.launch(program, ranks, "thread"):
            assert all(0.95 < ratio < 1.05 for ratio in ratios), ratios


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


def whole_of(model: nn.Module, sharded: ShardedModel) -> dict[str, torch.Tensor]:
    with sharded.full_parameters(writeback=False):
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_data_assigned_inside_full_parameters_is_kept() -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, _ = simple(comm)
        sizes = sum(p.numel() for p in model.parameters())
        values = torch.arange(float(sizes))
        with sharded.full_parameters():
            torch.nn.utils.vector_to_parameters(values, model.parameters())
        with sharded.full_parameters():
            assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), values)
            one, other, square = model[1].weight, model[2].weight, model[2].bias
            wanted = [other.clone(), one.t().clone(), square + 1]
            one.data, other.data = other.data, one.data.t()
            square.data = square.data + 1
        with sharded.full_parameters():
            found = [model[1].weight, model[2].weight, model[2].bias]
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            one.data = torch.zeros_like(one)
            one.data += 1
        before = whole_of(model, sharded)
        assert before["1.weight"].eq(1).all()

        def assign(wrong: torch.Tensor) -> None:
            with sharded.full_parameters():
                model[0].weight.data.zero_()
                one.data = wrong

        for wrong in (torch.zeros(2), torch.zeros_like(wanted[0], dtype=torch.float16)):
            with pytest.raises(RuntimeError, match=r"'1.weight' was given another shape, dtype or device"):
                assign(wrong)
        with sharded.full_parameters(writeback=False):
            one.data = torch.zeros(2)
        return all(torch.equal(before[name], value) for name, value in whole_of(model, sharded).items())

    assert on_two(program) == [True, True]


def test_data_assigned_in_a_forward_is_refused() -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, optimizer = simple(comm)
        before = whole_of(model, sharded)
        handle = model[1].register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", torch.ones(4, 4)))
        with pytest.raises(RuntimeError, match=r"'1.weight' was changed while its sharded model ran"):
            model(torch.ones(1, 3))
        handle.remove()
        assert torch.equal(whole_of(model, sharded)["1.weight"], before["1.weight"])
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return not torch.equal(whole_of(model, sharded)["1.weight"], before["1.weight"])

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
