"""ShardedOptimizer equals the unsharded optimizer: parameters, states, groups, clipping, accumulation."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from sharded_optimizers import BOTH, STEPS, loss_of, make_model, shard, train, values, whole
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam

import unisono as un
from unisono.core.tensor_shard import TensorShard


@BOTH
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(4, marks=pytest.mark.soak)]
)
def test_equals_the_unsharded_run(ranks: int, sharded: bool) -> None:
    def program(comm: Any) -> list[list[torch.Tensor]]:
        found = []
        for cls, options in ((SGD, {"lr": 0.1, "momentum": 0.9}), (AdamW, {"lr": 0.01}), (Adagrad, {"lr": 0.1})):
            model = make_model()
            found.append(train(model, shard(comm, model, cls, sharded=sharded, **options), comm.rank))
        return found

    results = un.launch(program, ranks, "thread")
    expected = [whole(ranks, SGD, lr=0.1, momentum=0.9), whole(ranks, AdamW, lr=0.01), whole(ranks, Adagrad, lr=0.1)]
    for found, (model, _) in zip(results[0], expected, strict=True):
        torch.testing.assert_close(found, values(model), rtol=0, atol=1e-12)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_same_bits_as_averaged(ranks: int, sharded: bool) -> None:
    def program(comm: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        plain, ours = make_model(torch.float32), make_model(torch.float32)
        un.GradientAverager(plain, comm)
        first = train(plain, Adam(plain.parameters(), lr=0.01), comm.rank)
        return first, train(ours, shard(comm, ours, Adam, sharded=sharded, lr=0.01), comm.rank)

    for first, second in un.launch(program, ranks, "thread", deterministic=True):
        assert all(map(torch.equal, first, second))


def test_each_rank_holds_its_part_of_states_and_gradients() -> None:
    def program(comm: Any) -> tuple[int, int]:
        model = make_model()
        optimizer = shard(comm, model, Adam, sharded=True)
        train(model, optimizer, comm.rank)
        loss_of(model, 9, comm.rank).backward()
        states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
        with torch.DisableTorchFunctionSubclass():
            grads = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage() for p in model.parameters()}
        assert sum(storage.nbytes() for storage in grads.values()) == 8 * len(grads)
        pieces = [p for group in optimizer._shards.param_groups for p in group["params"]]
        return sum(v.numel() for v in states), sum(p.grad.numel() for p in pieces)

    numel = sum(p.numel() for p in make_model().parameters())
    found = un.launch(program, 3, "thread")
    assert [sum(column) for column in zip(*found, strict=True)] == [2 * numel, numel]
    assert max(states for states, _ in found) <= 2 * math.ceil(numel / 3) + 8


def assembled(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the unsharded state, from those of all ranks."""

    def join(parts: list[Any]) -> Any:
        if not isinstance(parts[0], TensorShard):
            assert all(part == parts[0] for part in parts)
            return parts[0]
        flat = torch.cat([part.local for part in sorted(parts, key=lambda part: (part.start, len(part.local)))])
        return flat.view(parts[0].shape)

    first = states[0]["state"]
    joined = {i: {key: join([s["state"][i][key] for s in states]) for key in first[i]} for i in first}
    return {"state": joined, "param_groups": states[0]["param_groups"]}


@BOTH
def test_states_load_on_other_ranks_and_unsharded(sharded: bool) -> None:
    def first(comm: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
        model = make_model()
        optimizer = shard(comm, model, NAdam, sharded=sharded, lr=0.01)
        return train(model, optimizer, 0, range(2)), optimizer.state_dict()

    def second(comm: Any, weights: list[torch.Tensor], state: dict[str, Any]) -> list[torch.Tensor]:
        model = make_model()
        optimizer = shard(comm, model, NAdam, sharded=sharded, lr=0.5)
        with torch.no_grad():
            for p, value in zip(model.parameters(), weights, strict=True):
                p.copy_(value)
        optimizer.load_state_dict(state)
        optimizer.load_state_dict(optimizer.state_dict())
        return train(model, optimizer, 0, range(2, 4))

    saved = un.launch(first, 3, "thread")
    state = assembled([state for _, state in saved])
    model, optimizer = whole(1, NAdam, 2, lr=0.01)
    # Torch rounds some numbers of its own state when it loads it.
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 0, range(2, 4))
    for ranks in (1, 2, 4):
        for found in un.launch(second, ranks, "thread", (saved[0][0], state)):
            torch.testing.assert_close(found, values(model), rtol=0, atol=1e-12)
    plain = make_model()
    unsharded = NAdam(plain.parameters(), lr=0.5)
    unsharded.load_state_dict(state)
    assert unsharded.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    # Another rank's shards.
    with pytest.raises(ValueError, match="not this rank's shard"):
        un.launch(second, 2, "thread", (saved[0][0], saved[1][1]))


@BOTH
def test_groups_schedulers_and_closures(sharded: bool) -> None:
    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        return [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": biases, "lr": 0.2}]

    def run(model: nn.Module, optimizer: Any, rank: int) -> list[torch.Tensor]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def closure(step: int) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss.item()

        for step in range(STEPS):
            assert optimizer.step(lambda step=step: closure(step)) > 0
            scheduler.step()
        return values(model)

    def program(comm: Any) -> list[torch.Tensor]:
        model = make_model()
        if not sharded:
            un.GradientAverager(model, comm)
        made = un.sharding.ShardedOptimizer(
            SGD, groups(model), comm, shard_gradients=sharded, lr=0.1, elementwise=True, momentum=0.5
        )
        with pytest.raises(RuntimeError, match="no further groups"):
            made.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        return run(model, made, 0)

    model = make_model()
    expected = run(model, SGD(groups(model), lr=0.1, momentum=0.5), 0)
    torch.testing.assert_close(un.launch(program, 2, "thread")[1], expected, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clips_by_the_norm_of_whole_gradients(sharded: bool, norm_type: float) -> None:
    def program(comm: Any) -> tuple[float, list[torch.Tensor]]:
        model = make_model()
        optimizer = shard(comm, model, sharded=sharded, lr=1.0)
        loss_of(model, 0, 0).backward()
        norm = optimizer.clip_grad_norm_(0.5, norm_type)
        optimizer.step()
        return norm.item(), values(model)

    model = make_model()
    loss_of(model, 0, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    SGD(model.parameters(), lr=1.0).step()
    for found, weights in un.launch(program, 3, "thread"):
        assert found == pytest.approx(norm.item(), rel=1e-12)
        torch.testing.assert_close(weights, values(model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("inside", [True, False], ids=["no_sync", "each"])
def test_accumulates_over_passes(inside: bool) -> None:
    def program(comm: Any) -> list[torch.Tensor]:
        model = make_model()
        optimizer = shard(comm, model, sharded=True, lr=0.1)
        for step in range(2):
            # Dropped by the model's zero_grad(), which knows no shards.
            loss_of(model, 50, comm.rank).backward()
            with optimizer.no_sync():
                loss_of(model, 51, comm.rank).backward()
            model.zero_grad()
            if inside:
                with optimizer.no_sync():
                    loss_of(model, step, comm.rank).backward()
                with pytest.raises(RuntimeError, match=r"in no_sync\(\) are not averaged yet"):
                    optimizer.step()
            else:
                loss_of(model, step, comm.rank).backward()
            loss_of(model, step, comm.rank).backward()
            assert all(type(p.grad).__name__ == "ShardedGradient" for p in model.parameters())
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())
        return values(model)

    model, _ = whole(2, SGD, 2, lr=0.2)
    torch.testing.assert_close(un.launch(program, 2, "thread")[1], values(model), rtol=0, atol=1e-12)


@BOTH
def test_masters_keep_what_half_precision_rounds_away(sharded: bool) -> None:
    def program(comm: Any) -> tuple[float, float, dict[str, Any]]:
        w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = shard(comm, [w], sharded=sharded, lr=2.0**-10, master_dtype=torch.float32, elementwise=False)

        def step() -> None:
            optimizer.zero_grad()
            w.sum().backward()
            optimizer.step()

        for _ in range(8):
            step()
        state, after = copy.deepcopy(optimizer.state_dict()), w[0].item()
        with torch.no_grad():
            w.fill_(2.0)
        step()
        return after, optimizer._pieces[0].tensor.sum().item(), state

    found = un.launch(program, 2, "thread")
    assert [after for after, _, _ in found] == [1 - 8 * 2.0**-10] * 2
    assert sum(total for _, total, _ in found) == 3 * (2 - 2.0**-10)
    state = assembled([state for _, _, state in found])
    assert state["state"][0]["master"].tolist() == [1 - 8 * 2.0**-10] * 3

    def resumed(comm: Any) -> float:
        w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = shard(comm, [w], sharded=sharded, master_dtype=torch.float32)
        optimizer.load_state_dict({**state, "state": {0: {"master": torch.full((3,), 1.0 + 2.0**-12)}}})
        return float(optimizer.state_dict()["state"][0]["master"].local.sum())

    assert un.launch(resumed, 1, "thread") == [3 * (1.0 + 2.0**-12)]


@BOTH
def test_odd_parameters(sharded: bool) -> None:
    def make() -> nn.ParameterDict:
        return nn.ParameterDict(
            {
                "empty": nn.Parameter(torch.zeros(0, 3)),
                "scalar": nn.Parameter(torch.tensor(2.0)),
                "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
                "unused": nn.Parameter(torch.ones(5)),
                "wide": nn.Parameter(torch.ones(2, dtype=torch.float64)),
                "strided": nn.Parameter(torch.arange(6.0).view(2, 3).t()),
            }
        )

    def run(model: nn.ParameterDict, optimizer: Any) -> list[torch.Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            total = (model["scalar"] * model["strided"] * model["frozen"]).sum() + model["empty"].sum()
            (total + model["wide"].square().sum()).backward()
            optimizer.step()
        return values(model)

    def program(comm: Any) -> list[torch.Tensor]:
        model = make()
        # Which includes the trial of the class on parameters like these.
        options = {"lr": 0.1, "weight_decay": 0.1, "elementwise": False}
        return run(model, shard(comm, model, Adam, sharded=sharded, **options))

    model = make()
    expected = run(model, Adam(model.parameters(), lr=0.1, weight_decay=0.1))
    for found in un.launch(program, 4, "thread"):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
