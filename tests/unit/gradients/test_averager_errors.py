"""Ranks that do not fit together are named on every rank; wrong arguments are refused."""

from __future__ import annotations

from collections.abc import Callable
from traceback import format_exception_only

import pytest
import torch
from averaged_models import TINY, Branches, Net, batches, made
from averager_helpers import RANKS
from insides import engine_of
from torch import nn

import unisono as un
from unisono.testing import pool


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_rank_skipping_a_parameter_is_named_on_every_rank(backend: str) -> None:
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


@pytest.mark.soak
def test_many_ranks_are_counted_in_half_precision() -> None:
    def program(comm: un.Communicator) -> bool:
        weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        un.GradientAverager([weight], comm)
        weight.sum().backward()
        return weight.grad is not None

    # In bfloat16, 48 times 1/48 is not 1.
    assert un.launch(program, 48, "thread") == [True] * 48


def test_gradient_missing_on_all_ranks_is_not_reported() -> None:
    def program(comm: un.Communicator) -> str:
        one, two, three = (torch.ones(1, requires_grad=True) for _ in range(3))
        averager = un.GradientAverager([one, two, three], comm)
        losses = [[one.sum()], [(one + three).sum()], []][comm.rank]

        def train() -> None:
            with averager.join():
                for loss in losses:
                    loss.backward()

        with pytest.raises(un.errors.MismatchError) as caught:
            train()
        return str(caught.value)

    for message in un.launch(program, 3, "thread"):
        assert "rank 0 has no gradient for 'parameter 2', which" in message


def test_different_model_is_named_on_every_rank() -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 + comm.rank))
        with pytest.raises(un.errors.MismatchError) as caught:
            un.GradientAverager(model, comm)
        return str(caught.value)

    for message in un.launch(program, 2, "thread"):
        assert "at ['1.bias']: rank 0: 'float32 (4,) on cpu'; rank 1: 'float32 (5,) on cpu'" in message


def test_different_memory_format_is_named_on_every_rank() -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Conv2d(3, 2, 2)
        if comm.rank == 1:
            model.to(memory_format=torch.channels_last)
        with pytest.raises(un.errors.MismatchError) as caught:
            un.GradientAverager(model, comm)
        return str(caught.value)

    for message in un.launch(program, 2, "thread"):
        assert "rank 1: 'float32 (2, 3, 2, 2) on cpu with strides (12, 1, 6, 3)'" in message


def test_rank_with_fewer_steps_is_named_with_parameters() -> None:
    def program(comm: un.Communicator) -> str:
        model = made(Net)
        un.GradientAverager(model, comm, **TINY)
        batch = batches(1, 1)[0][0]
        model(batch).sum().backward()
        action = model(batch).sum().backward if comm.rank == 0 else comm.barrier
        with pytest.raises(un.errors.CommError) as caught:
            action()
        return "".join(format_exception_only(caught.value)).removeprefix("unisono.errors.")

    one, other = un.launch(program, 2, "sim", timeout=1)
    assert "while averaging the gradients of 'unused.bias' to 'c.bias'" in one
    assert one.startswith(("CommTimeoutError", "DeadlockError", "PeerLostError"))
    assert other.startswith(("CommTimeoutError", "DeadlockError", "PeerLostError"))


def test_weight_set_on_one_rank_only_is_reported() -> None:
    def program(comm: un.Communicator) -> str:
        model = made(Net)
        averager = un.GradientAverager(model, comm)
        if comm.rank == 1:
            averager.weight(3)
        with pytest.raises(un.errors.CommError) as caught:
            model(batches(1, 1)[0][0]).sum().backward()
        return "".join(format_exception_only(caught.value))

    one, other = un.launch(program, 2, "sim", timeout=1)
    assert "rank 1" in one
    assert "while averaging the gradients of 'unused.bias' to 'a.weight'" in one
    assert "while exchanging weights (all ranks or none must call weight())" in other


def test_bad_arguments_are_rejected_before_sending() -> None:
    comm = un.init("thread")
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        un.GradientAverager(model, comm, average="median")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="at least one byte"):
        un.GradientAverager(model, comm, bucket_cap_mb=0)
    with pytest.raises(TypeError, match="not a single Parameter"):
        un.GradientAverager(model.weight, comm)
    with pytest.raises(TypeError, match="not a single SGD"):
        un.GradientAverager(torch.optim.SGD(model.parameters()), comm)  # type: ignore[arg-type]  # on purpose
    used = model.parameters()
    assert len(list(used)) == 2
    for call in (un.GradientAverager, un.average_gradients, un.broadcast_parameters):
        with pytest.raises(ValueError, match="exhausted iterator"):
            call(used, comm)
    with pytest.raises(TypeError, match="parameter 1 must be a tensor, not str"):
        un.GradientAverager([model.weight, "bias"], comm)  # type: ignore[list-item]  # on purpose


@pytest.mark.parametrize("call", [un.average_gradients, un.broadcast_parameters])
def test_different_models_of_equal_length_are_detected(call: Callable[..., None]) -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Linear(3, 2, bias=False) if comm.rank else nn.Linear(2, 3, bias=False)
        before = model.weight.clone()
        with pytest.raises(un.errors.MismatchError) as caught:
            call(model, comm)
        assert model.weight.equal(before)
        return str(caught.value)

    for said in un.launch(program, 2, "thread"):
        assert "['weight']: rank 0: 'float32 (3, 2) on cpu'; rank 1: 'float32 (2, 3) on cpu'" in said


@pytest.mark.parametrize("call", [un.GradientAverager, un.broadcast_parameters])
@pytest.mark.parametrize("odd", ["sparse", "expanded"])
def test_unshareable_buffers_are_named(odd: str, call: Callable[..., object]) -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Linear(3, 2)
        model.register_buffer("even", torch.ones(3))
        model.register_buffer("odd", torch.eye(3).to_sparse() if odd == "sparse" else torch.ones(1).expand(3))
        with pytest.raises(ValueError, match="'odd'") as caught:
            call(model, comm)
        comm.barrier()
        return str(caught.value)

    (said,) = set(un.launch(program, 2, "thread"))
    hint = " (which init_sync=False does not broadcast)" if call is un.GradientAverager else ""
    what = "is torch.sparse_coo" if odd == "sparse" else "has elements that share memory"
    assert said.startswith(f"'odd'{hint} {what}")


@pytest.mark.parametrize("call", [un.average_gradients, un.broadcast_parameters])
def test_parameters_are_compared_once(call: Callable[..., None]) -> None:
    def program(comm: un.Communicator) -> list[int]:
        model, counts = nn.Linear(3, 2), []
        for _ in range(3):
            before = engine_of(comm).activity.calls
            call(model, comm)
            counts.append(engine_of(comm).activity.calls - before)
        return counts

    for first, second, third in un.launch(program, 2, "thread"):
        assert first > second == third


@pytest.mark.parametrize("frozen", [[(1, 1), (2, 2), (1, 2)], [(1, 2)], [(0, 0), (0, 2)]])
def test_ranks_with_different_frozen_parameters_are_named(frozen: list[tuple[int, int]]) -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        for step, layers in enumerate(frozen):
            for index, layer in enumerate(model):
                layer.requires_grad_(index != layers[comm.rank])
            model(torch.ones(1, 3)).sum().backward()
            if step < len(frozen) - 1:
                un.average_gradients(model, comm)
        with pytest.raises(un.errors.MismatchError) as caught:
            un.average_gradients(model, comm)
        return str(caught.value)

    for said in un.launch(program, 2, "thread"):
        sides = "rank 0: 'float32 (3,) on cpu, frozen'; rank 1: 'float32 (3,) on cpu'"
        assert f"at ['{frozen[-1][0]}.bias']: {sides}" in said


@pytest.mark.parametrize("size", ["25", float("nan"), [25]])
def test_bucket_size_of_zero_is_rejected(size: object) -> None:
    def program(comm: un.Communicator, size: object) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            with pytest.raises(TypeError, match="must be a number of MiB"):
                un.GradientAverager(made(Net), comm, **{name: size})
        un.GradientAverager(made(Net), comm, bucket_cap_mb=float("inf")).remove()

    un.launch(program, 2, "thread", (size,))


@pytest.mark.parametrize("init_sync", [False, True])
@pytest.mark.parametrize(("backend", "size"), RANKS)
def test_parameters_on_the_meta_device_are_refused(backend: str, size: int, init_sync: bool) -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with pytest.raises(ValueError, match="meta") as caught:
            un.GradientAverager(model, comm, init_sync=init_sync)
        return str(caught.value)

    for text in pool(backend, 3).run(program, size=size):
        assert "'1.weight'" in text
