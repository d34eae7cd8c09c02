"""Hooks that average: equal to one process with all ranks' samples, whatever the model and the loop do."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.testing import pool

Model = Callable[[], nn.Module]
TINY = {"bucket_cap_mb": 0.002, "first_bucket_mb": 0.0005}
"""So that a few numbers need several buckets."""


def made(make: Model, seed: int = 0) -> nn.Module:
    """The same model in each thread: the global generator belongs to all of them."""
    model = make().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def batches(size: int, count: int, samples: int = 3, width: int = 6, seed: int = 1) -> list[list[torch.Tensor]]:
    """For each rank `count` batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(samples, width, generator=generator, dtype=torch.float64) for _ in range(count)]
        for _ in range(size)
    ]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().to_dense().clone() for p in model.parameters()]


def same(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b, 0, 1e-10))
        for a, b in zip(found, wanted, strict=True)
    )


class Net(nn.Module):
    """A stack whose forward can be told to checkpoint, to share, and to skip."""

    def __init__(self, *, reentrant: bool | None = None, shared: bool = False, skip: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 6)
        self.unused = nn.Linear(2, 2)
        self.reentrant, self.shared, self.skip = reentrant, shared, skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = (lambda t: self.b(torch.tanh(self.b(t)))) if self.shared else self.b
        if self.reentrant is None:
            hidden = middle(torch.tanh(self.a(x)))
        else:
            x = x.clone().requires_grad_()
            hidden = checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=self.reentrant)
            hidden = checkpoint(middle, hidden, use_reentrant=self.reentrant)
            if self.shared:
                hidden = checkpoint(middle, hidden, use_reentrant=self.reentrant)
        out: torch.Tensor = self.c(torch.tanh(hidden))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x.view(-1, 3, 2))[0])
        return out


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 2), nn.Linear(8, 3)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.conv(x.view(-1, 1, 2, 3))).flatten(1))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.into = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.into(x.view(-1, 3, 2)))
        return out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(3))

    def double(self) -> Complex:
        self.bias.data = self.bias.data.double()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs() + self.bias


MODELS: dict[str, Model] = {
    "plain": Net,
    "convolution, channels last": Convolutional,
    "recurrent": Recurrent,
    "attention": Attention,
    "complex and real": Complex,
    "checkpointed": lambda: Net(reentrant=False),
    "checkpointed, re-entrant": lambda: Net(reentrant=True),
    "shared": lambda: Net(shared=True),
    "shared and checkpointed, re-entrant": lambda: Net(reentrant=True, shared=True),
}


def wanted_of(make: Model, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """One process, all samples."""
    model = made(make)
    model(torch.cat(given)).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process_with_all_samples(name: str, backend: str) -> None:
    size, make = 3, MODELS[name]
    given = batches(size, 3)

    def program(comm: un.Communicator) -> list[list[torch.Tensor | None]]:
        model = made(make, seed=comm.rank)
        averager = un.GradientAverager(model, comm, **TINY)
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), made(make).parameters(), strict=True):
                assert torch.equal(parameter, first), "rank 0's parameters must be everybody's"
        steps = []
        for batch in given[comm.rank]:
            model.zero_grad()
            model(batch).square().mean().backward()
            steps.append(gradients(model))
        averager.remove()
        return steps

    results = pool(backend, 3).run(program)
    for step in range(3):
        wanted = wanted_of(make, [given[rank][step] for rank in range(size)])
        for rank in range(size):
            assert same(results[rank][step], wanted), f"step {step} on rank {rank}"
            assert all(
                a is None or torch.equal(a, b) for a, b in zip(results[0][step], results[rank][step], strict=True)
            ), "other bits than on rank 0"


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
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


def test_no_sync_governs_the_backward_inside_it_wherever_the_forward_ran() -> None:
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


class Branches(nn.Module):
    """Uses one of its branches, by the sign of its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        branch = self.left if left else self.right
        out: torch.Tensor = branch(self.trunk(x))
        return out


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_ranks_may_skip_parameters_if_that_was_said(backend: str) -> None:
    given = batches(3, 1)

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Branches)
        averager = un.GradientAverager(model, comm, find_unused=True, **TINY)
        model(given[comm.rank][0], comm.rank == 0).square().sum().backward()
        averager.remove()
        return gradients(model)

    model = made(Branches)
    (sum(model(given[r][0], r == 0).square().sum() for r in range(3)) / 3).backward()
    for found in pool(backend, 3).run(program):
        assert same(found, gradients(model))


def test_what_no_rank_uses_stays_without_a_gradient() -> None:
    def program(comm: un.Communicator) -> list[bool]:
        model = made(Branches)
        un.GradientAverager(model, comm, find_unused=True)
        model(batches(1, 1)[0][0], True).sum().backward()
        return [p.grad is None for p in model.parameters()]

    assert un.launch(program, 2, "thread") == [[False] * 4 + [True] * 2] * 2


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_a_rank_that_skips_a_parameter_is_named_on_every_rank(backend: str) -> None:
    def program(comm: un.Communicator) -> str:
        model = made(Branches)
        averager = un.GradientAverager(model, comm, **TINY)
        with pytest.raises(un.errors.MismatchError) as caught:
            model(batches(1, 1)[0][0], comm.rank != 1).sum().backward()
        # Nothing is broken: the next step is right again.
        model.zero_grad()
        model(batches(1, 1)[0][0], True).sum().backward()
        averager.remove()
        return str(caught.value)

    for message in pool(backend, 3).run(program):
        assert "rank 1 has no gradient for 'left.weight' (and 3 more)" in message


def test_another_model_is_named_on_every_rank() -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 + comm.rank))
        with pytest.raises(un.errors.MismatchError) as caught:
            un.GradientAverager(model, comm)
        return str(caught.value)

    for message in un.launch(program, 2, "thread"):
        assert "rank 1 has another model than rank 0: '1.weight' is float32 [4, 3] on cpu on rank 0, " in message


def test_a_rank_that_makes_fewer_steps_is_named_with_the_parameters() -> None:
    def program(comm: un.Communicator) -> str:
        model = made(Net)
        un.GradientAverager(model, comm, **TINY)
        batch = batches(1, 1)[0][0]
        model(batch).sum().backward()
        action = model(batch).sum().backward if comm.rank == 0 else comm.barrier
        with pytest.raises(un.errors.CommError) as caught:
            action()
        return f"{type(caught.value).__name__} {caught.value}"

    one, other = un.launch(program, 2, "thread", timeout=1)
    assert "while averaging the gradients of 'unused.bias' to 'c.bias'" in one
    assert one.startswith(("CommTimeoutError", "PeerLostError"))
    assert other.startswith(("CommTimeoutError", "PeerLostError"))


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_weights_make_the_mean_over_samples(backend: str) -> None:
    lengths = [1, 5, 2]
    given = [batches(1, 1, samples=n, seed=n)[0][0] for n in lengths]

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        averager = un.GradientAverager(model, comm, **TINY)
        for _ in range(2):
            model.zero_grad()
            averager.weight(lengths[comm.rank])
            model(given[comm.rank]).square().mean().backward()
        averager.remove()
        return gradients(model)

    wanted = wanted_of(Net, given)
    for found in pool(backend, 3).run(program):
        assert same(found, wanted)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_of_samples(weight: float) -> None:
    averager = un.GradientAverager([torch.zeros(1, requires_grad=True)], un.init("thread"))
    with pytest.raises(ValueError, match="at least 0"):
        averager.weight(weight)


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_ranks_may_have_fewer_batches_inside_join(backend: str) -> None:
    steps = [4, 2, 3]
    given = batches(3, 4)

    def train(model: nn.Module, mine: list[torch.Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in mine:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def program(comm: un.Communicator) -> list[torch.Tensor]:
        model = made(Net)
        averager = un.GradientAverager(model, comm, **TINY)
        with averager.join():
            train(model, given[comm.rank][: steps[comm.rank]])
        averager.remove()
        return [p.detach().clone() for p in model.parameters()]

    model = made(Net)
    train(model, [torch.cat([given[r][i] for r in range(3) if i < steps[r]]) for i in range(max(steps))])
    for found in pool(backend, 3).run(program):
        for parameter, wanted in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted.detach(), rtol=0, atol=1e-10)


def test_parameters_that_thaw_are_averaged_from_then_on() -> None:
    given = batches(2, 2)

    def program(comm: un.Communicator) -> list[list[torch.Tensor | None]]:
        model = made(Net)
        model.get_submodule("a").requires_grad_(False)
        un.GradientAverager(model, comm, **TINY)
        found = []
        for step in range(2):
            if step:
                model.get_submodule("a").requires_grad_(True)
            model.zero_grad()
            model(given[comm.rank][step]).square().mean().backward()
            found.append(gradients(model))
        return found

    first, second = (wanted_of(Net, [given[r][step] for r in range(2)]) for step in range(2))
    for found in un.launch(program, 2, "thread"):
        assert found[0][:2] == [None, None]
        assert same(found[0][2:], first[2:])
        assert same(found[1], second)


def test_parameters_that_freeze_are_left_alone() -> None:
    given = batches(2, 2)

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        un.GradientAverager(model, comm, **TINY)
        model(given[comm.rank][0]).square().mean().backward()
        model.zero_grad()
        model.get_submodule("a").requires_grad_(False)
        model(given[comm.rank][1]).square().mean().backward()
        return gradients(model)

    wanted = wanted_of(Net, [given[r][1] for r in range(2)])
    for found in un.launch(program, 2, "thread"):
        assert found[:2] == [None, None]
        assert same(found[2:], wanted[2:])


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(x))
        return out


@pytest.mark.parametrize("as_list", [True, False])
def test_sparse_gradients_equal_dense_ones(as_list: bool) -> None:
    words = [torch.tensor([1, 2, 2]), torch.tensor([8, 2]), torch.tensor([], dtype=torch.int64)]

    def program(comm: un.Communicator) -> tuple[bool, list[torch.Tensor | None]]:
        model = made(lambda: Words(sparse=True))
        un.GradientAverager(list(model.parameters()) if as_list else model, comm)
        model(words[comm.rank]).square().sum().backward()
        return model.get_parameter("embedding.weight").grad.is_sparse, gradients(model)  # type: ignore[union-attr]

    model = made(lambda: Words(sparse=False))
    (sum(model(w).square().sum() for w in words) / 3).backward()
    for is_sparse, found in un.launch(program, 3, "thread"):
        assert is_sparse is not as_list
        assert same(found, gradients(model))


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


def test_several_models_and_mixed_dtypes_do_not_meet() -> None:
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


def test_an_error_in_backward_does_not_spoil_the_next_step() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("on purpose")

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        un.GradientAverager(model, comm, **TINY)
        batch = batches(2, 1)[comm.rank][0]
        with pytest.raises(RuntimeError, match="on purpose"):
            model.get_submodule("c")(Fails.apply(model.get_submodule("a")(batch))).sum().backward()
        model.zero_grad()
        model(batch).square().mean().backward()
        return gradients(model)

    wanted = wanted_of(Net, [rank[0] for rank in batches(2, 1)])
    for found in un.launch(program, 2, "thread"):
        assert same(found, wanted)


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


def test_buffers_become_rank_0s_if_wanted() -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = nn.BatchNorm1d(1).double()
        un.GradientAverager(model, comm, sync_buffers=True)
        model(torch.tensor([[1.0], [3.0]], dtype=torch.float64) * (comm.rank + 1)).sum().backward()
        return [float(b) for b in model.buffers()]

    alone = nn.BatchNorm1d(1).double()
    alone(torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    assert un.launch(program, 3, "thread") == [[float(b) for b in alone.buffers()]] * 3


def test_the_hooks_keep_the_averager_and_remove_lets_it_go() -> None:
    def program(comm: un.Communicator) -> tuple[bool, bool, float]:
        weight = torch.zeros(1, requires_grad=True)
        kept = weakref.ref(un.GradientAverager([weight], comm))
        gc.collect()
        averager = kept()
        alive = averager is not None
        assert averager is not None
        averager.remove()
        averager.remove()
        del averager
        gc.collect()
        (weight * comm.rank).sum().backward()
        assert weight.grad is not None
        return alive, kept() is None, weight.grad.item()

    # Ranks in processes of their own: the collector of a process works for one thread at a time.
    assert pool("shm", 3).run(program, size=2) == [(True, True, 0.0), (True, True, 1.0)]


def test_a_sum_and_a_world_of_one() -> None:
    def program(comm: un.Communicator) -> float:
        weight = torch.zeros(1, requires_grad=True)
        un.GradientAverager([weight], comm, average="sum")
        (weight * (comm.rank + 1)).sum().backward()
        assert weight.grad is not None
        return weight.grad.item()

    assert un.launch(program, 3, "thread") == [6.0] * 3
    assert un.launch(program, 1, "thread") == [1.0]


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    comm = un.init("thread")
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        un.GradientAverager(model, comm, average="median")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="at least a byte"):
        un.GradientAverager(model, comm, bucket_cap_mb=0)
    with pytest.raises(TypeError, match="single tensor"):
        un.GradientAverager(model.weight, comm)
    with pytest.raises(TypeError, match="parameter 1 is a str"):
        un.GradientAverager([model.weight, "bias"], comm)  # type: ignore[list-item]  # on purpose


def test_a_compiled_model_is_averaged_too() -> None:
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


def test_deep_copies_of_a_model_are_not_averaged() -> None:
    def program(comm: un.Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1))
        un.GradientAverager([weight], comm)
        other = copy.deepcopy(weight)
        (other * comm.rank).sum().backward()
        assert other.grad is not None
        return other.grad.item()

    assert un.launch(program, 2, "thread") == [0.0, 1.0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_buckets_follow_the_order_in_which_gradients_come(backend: str) -> None:
    def program(comm: un.Communicator) -> tuple[list[list[str]], list[list[str]]]:
        names = ["early", "middle", "late"]
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(64)) for name in names})
        averager = un.GradientAverager(model, comm, bucket_cap_mb=0.00025, first_bucket_mb=0.00025)
        before = averager.buckets
        loss = torch.zeros(64)
        # Used in the order of names reversed, so gradients come in the order of names.
        for name in ("late", "middle", "early"):
            loss = torch.tanh(loss + model[name])
        loss.sum().backward()
        after = averager.buckets
        averager.remove()
        return before, after

    # A ParameterDict sorts what a dict gives it.
    by_registration = [["middle"], ["late"], ["early"]]
    expected = [["early"], ["middle"], ["late"]] if backend == "gloo" else by_registration
    assert pool(backend, 3).run(program, size=2) == [(by_registration, expected)] * 2
