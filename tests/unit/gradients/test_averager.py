"""Hooks that average: equal to one process with all ranks' samples, whatever the model does."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest
import torch
from averaged_models import MODELS, TINY, Net, batches, gradients, made, same, stepped, wanted_of
from pairwise import short
from torch import nn

import unisono as un
from unisono.gradients import plan_buckets
from unisono.testing import pool

# Over gloo, buckets are reduced while gradients still come; processes import torch's compiler for checkpointed models.
SHORT = [
    ("plain", "thread"),
    ("plain", "shm"),
    ("checkpointed", "thread"),
    *((name, "gloo") for name in MODELS if name != "checkpointed"),
]


@short("name, backend", product(MODELS, ["thread", "shm", "gloo"]), SHORT)
def test_gradients_equal_those_of_one_process(name: str, backend: str) -> None:
    size, make = 2, MODELS[name]
    given = batches(size, 3)

    def program(comm: un.Communicator) -> list[list[torch.Tensor | None]]:
        model = made(make, seed=comm.rank)
        averager = un.GradientAverager(model, comm, **TINY)
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), made(make).parameters(), strict=True):
                assert torch.equal(parameter, first), "rank 0's parameters must be everybody's"
        steps = stepped(model, given[comm.rank])
        averager.remove()
        return steps

    results = pool(backend, 3).run(program, size=size)
    for step in range(3):
        wanted = wanted_of(make, [given[rank][step] for rank in range(size)])
        for rank in range(size):
            assert same(results[rank][step], wanted), f"step {step} on rank {rank}"
            assert all(
                a is None or torch.equal(a, b) for a, b in zip(results[0][step], results[rank][step], strict=True)
            ), "other bits than on rank 0"


@short(
    "backend, set_to_none",
    product(["thread", "shm", "gloo"], [True, False]),
    [("thread", True), ("gloo", True), ("gloo", False)],
)
def test_accumulation_equals_one_large_batch(backend: str, set_to_none: bool) -> None:
    given = batches(2, 3)

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        averager = un.GradientAverager(model, comm, **TINY)
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            with averager.no_sync():
                for batch in given[comm.rank][:-1]:
                    (model(batch).square().mean() / 3).backward()
            (model(given[comm.rank][-1]).square().mean() / 3).backward()
        averager.remove()
        return gradients(model)

    found = pool(backend, 3).run(program, size=2)
    wanted = wanted_of(Net, [batch for rank in given for batch in rank])
    if not set_to_none:
        assert found[0][-1] is None
    assert same(found[0], wanted)
    assert same(found[1], wanted)


def test_no_sync_applies_to_backward_not_forward() -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = torch.zeros(1, requires_grad=True)
        averager = un.GradientAverager([weight], comm)
        loss = (weight * (comm.rank + 1.0)).sum()
        with averager.no_sync():
            loss.backward()
            again = (weight * (comm.rank + 1.0)).sum()
        assert weight.grad is not None
        alone = weight.grad.item()
        weight.grad = None
        again.backward()
        assert weight.grad is not None
        return [alone, weight.grad.item()]

    assert un.launch(program, 2, "thread") == [[1.0, 1.5], [2.0, 1.5]]


def test_several_backward_passes_add_up() -> None:
    def program(comm: un.Communicator) -> float:
        weight = torch.zeros(1, requires_grad=True)
        un.GradientAverager([weight], comm)
        for factor in (1.0, 10.0):
            (weight * factor * (comm.rank + 1)).sum().backward()
        assert weight.grad is not None
        return weight.grad.item()

    assert un.launch(program, 2, "thread") == [16.5, 16.5]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_higher_order_gradients_keep_their_graph() -> None:
    def program(comm: un.Communicator) -> tuple[float, float]:
        weight = torch.full((1,), 2.0, requires_grad=True)
        un.GradientAverager([weight], comm)
        (weight.pow(3) * (comm.rank + 1)).sum().backward(create_graph=True)
        assert weight.grad is not None
        (second,) = torch.autograd.grad(weight.grad.sum(), weight)
        return weight.grad.item(), second.item()

    # 3 w^2 (r + 1), averaged; its derivative 6 w (r + 1) stays this rank's.
    assert un.launch(program, 2, "thread") == [(18.0, 12.0), (18.0, 24.0)]


def test_several_models_and_mixed_dtypes_are_separate() -> None:
    def program(comm: un.Communicator) -> list[float]:
        kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        models = [[torch.ones(3, dtype=kind, requires_grad=True) for kind in kinds] for _ in range(2)]
        for model in models:
            un.GradientAverager(model, comm)
        loss = sum((p.double() * (comm.rank + 1) * (k + 1)).sum() for k, model in enumerate(models) for p in model)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return [p.grad.double().mean().item() for model in models for p in model if p.grad is not None]

    assert un.launch(program, 2, "thread") == [[1.5] * 4 + [3.0] * 4] * 2


def test_clipping_and_scaling_see_the_mean() -> None:
    given = batches(2, 1)

    def program(comm: un.Communicator) -> tuple[float, float]:
        model = made(Net)
        un.GradientAverager(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(given[comm.rank][0]).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        after = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]).norm()
        return norm.item(), after.item()

    wanted = torch.cat([g.view(-1) for g in wanted_of(Net, [rank[0] for rank in given]) if g is not None]).norm()
    for norm, after in un.launch(program, 2, "thread"):
        assert norm == pytest.approx(wanted.item(), abs=1e-10)
        assert after == pytest.approx(1e-3, rel=1e-2)


def test_buffers_are_broadcast_from_rank_0() -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = nn.BatchNorm1d(1).double()
        un.GradientAverager(model, comm, broadcast_buffers=True)
        model(torch.tensor([[1.0], [3.0]], dtype=torch.float64) * (comm.rank + 1)).sum().backward()
        return [float(b) for b in model.buffers()]

    alone = nn.BatchNorm1d(1).double()
    alone(torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    assert un.launch(program, 3, "thread") == [[float(b) for b in alone.buffers()]] * 3


def test_sum_and_single_rank() -> None:
    def program(comm: un.Communicator) -> float:
        weight = torch.zeros(1, requires_grad=True)
        un.GradientAverager([weight], comm, average="sum")
        (weight * (comm.rank + 1)).sum().backward()
        assert weight.grad is not None
        return weight.grad.item()

    assert un.launch(program, 3, "thread") == [6.0] * 3
    assert un.launch(program, 1, "thread") == [1.0]


@pytest.mark.soak
def test_compiled_model_is_averaged() -> None:
    given = batches(2, 1)

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        un.GradientAverager(model, comm)
        # The tracer that compiling uses, without the compiler.
        compiled = torch.compile(model, backend="aot_eager")
        compiled(given[comm.rank][0]).square().mean().backward()
        return gradients(model)

    wanted = wanted_of(Net, [rank[0] for rank in given])
    for found in un.launch(program, 2, "shm"):
        assert same(found, wanted)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_buckets_follow_gradient_order(backend: str) -> None:
    def program(comm: un.Communicator) -> tuple[list[list[str]], list[list[str]]]:
        names = ["early", "middle", "late"]
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(64)) for name in names})
        averager = un.GradientAverager(model, comm, bucket_cap_mb=0.00025, first_bucket_mb=0.00025)
        before = averager.buckets
        loss = torch.zeros(64)
        # Gradients come in the opposite order, which is neither that of names nor of parameters.
        for name in ("middle", "early", "late"):
            loss = torch.tanh(loss + model[name])
        loss.sum().backward()
        after = averager.buckets
        averager.remove()
        return before, after

    # A ParameterDict sorts what a dict gives it.
    by_registration = [["middle"], ["late"], ["early"]]
    expected = [["late"], ["early"], ["middle"]] if backend == "gloo" else by_registration
    assert pool(backend, 3).run(program, size=2) == [(by_registration, expected)] * 2


@pytest.mark.parametrize(
    ("backend", "codec", "cores", "first"),
    [
        ("gloo", None, [64, 64], 1),
        ("gloo", None, [64, 1], 2),
        # A state of a codec is of as many buckets whatever machine it is loaded on.
        ("gloo", "topk", [64, 64], 2),
        ("shm", None, [64, 64], 2),
    ],
)
def test_first_bucket_is_small_with_overlap(backend: str, codec: str | None, cores: list[int], first: int) -> None:
    def program(comm: un.Communicator, checked: bool) -> int:
        model = nn.ParameterList(torch.zeros(150_000) for _ in range(2))
        with patch("unisono.utils.flatten.cores", lambda: cores[comm.rank]):
            averager = un.GradientAverager(model, comm if checked else comm.dup(check="off"), compression=codec)
        found = len(averager.buckets[0])
        averager.remove()
        return found

    for checked in (True, False):
        assert pool(backend, 3).run(program, checked, size=2) == [first, first]


def test_parameter_lengths_are_read_at_most_twice() -> None:
    asked = 0

    class Counted(nn.Parameter):
        @property
        def nbytes(self) -> int:  # type: ignore[override]  # torch's is a property too
            nonlocal asked
            asked += 1
            return 8

    parameters = [Counted(torch.zeros(1)) for _ in range(100)]
    assert plan_buckets(parameters, range(100), 8 * 30, 8) == [
        [0],
        list(range(1, 31)),
        list(range(31, 61)),
        list(range(61, 91)),
        list(range(91, 100)),
    ]
    assert asked <= 200
