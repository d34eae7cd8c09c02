"""Parameters that thaw and freeze while an averager is attached."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from averaged_models import TINY, Net, batches, gradients, made, same, wanted_of

import unisono as un
from unisono.testing import pool


def test_unfrozen_parameters_are_averaged() -> None:
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


@pytest.mark.parametrize("inside", [False, True])
def test_whole_model_may_be_unfrozen(inside: bool) -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net).requires_grad_(False)
        averager = un.GradientAverager(model, comm, **TINY)
        model.requires_grad_(True)
        with averager.no_sync() if inside else nullcontext():
            model(given[comm.rank][0]).square().mean().backward()
        if inside:
            model.zero_grad()
            model(given[comm.rank][0]).square().mean().backward()
        return gradients(model)

    given = batches(2, 1)
    wanted = wanted_of(Net, [given[r][0] for r in range(2)])
    for found in un.launch(program, 2, "thread"):
        assert same(found, wanted)


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_parameter_unfrozen_on_one_rank_is_named_on_every_rank(backend: str) -> None:
    def program(comm: un.Communicator) -> str:
        model = made(Net)
        model.get_submodule("b").requires_grad_(False)
        averager = un.GradientAverager(model, comm, **TINY)
        batch = batches(1, 1)[0][0]
        model(batch).sum().backward()
        model.get_submodule("b").requires_grad_(comm.rank == 1)
        with pytest.raises(un.errors.MismatchError) as caught:
            model(batch).sum().backward()
        # Nothing is broken: the next step is right again.
        model.get_submodule("b").requires_grad_(True)
        model(batch).sum().backward()
        averager.remove()
        return str(caught.value)

    for message in pool(backend, 3).run(program):
        assert "['b.bias']: ranks 0, 2: 'float64 (40,) on cpu, frozen'; rank 1: 'float64 (40,) on cpu'" in message


def test_unfrozen_parameter_without_others_is_named() -> None:
    def program(comm: un.Communicator) -> str:
        model = made(Net).requires_grad_(False)
        un.GradientAverager(model, comm)
        model.requires_grad_(comm.rank == 1)
        action = model(batches(1, 1)[0][0]).sum().backward if comm.rank else comm.barrier
        with pytest.raises(un.errors.CommError) as caught:
            action()
        return "".join(getattr(caught.value, "__notes__", ()))

    assert "no longer frozen on rank 1: ['a.weight', 'a.bias', " in un.launch(program, 2, "sim", timeout=1)[1]


def test_newly_frozen_parameters_are_unchanged() -> None:
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


def test_parameter_frozen_after_its_forward_may_have_hooks() -> None:
    """Torch calls them, and adds nothing: no hook has taken the gradient."""

    def program(comm: un.Communicator) -> tuple[list[torch.Tensor | None], int]:
        one, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        calls: list[torch.Tensor] = []
        one.register_post_accumulate_grad_hook(calls.append)
        averager = un.GradientAverager([one, other], comm)
        loss = (one * other * (comm.rank + 1.0)).sum()
        one.requires_grad_(False)
        loss.backward()
        averager.remove()
        return [one.grad, other.grad], len(calls)

    for found, calls in un.launch(program, 2, "thread"):
        assert calls == 1
        assert same(found, [None, torch.full((2,), 1.5)])


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("create_graph", [False, True])
def test_parameter_may_be_unfrozen_with_a_late_chunk_of_another(create_graph: bool) -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        first, second, frozen = (torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True) for _ in range(3))
        frozen.requires_grad_(False)
        thawed = [False]

        def again(_: torch.Tensor) -> None:
            if thawed[0]:
                with torch.enable_grad():
                    (first * 10.0 * (comm.rank + 1)).sum().backward()

        averager = un.GradientAverager([second, first, frozen], comm, bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
        second.register_post_accumulate_grad_hook(again)
        for step in range(2):
            thawed[0] = bool(step)
            frozen.requires_grad_(thawed[0])
            for parameter in (first, second, frozen):
                parameter.grad = None
            # The gradient of the first comes before that of the second, whose hook adds to it.
            loss = ((second * 3.0) * first).sum() + (frozen * (comm.rank + 1)).sum()
            loss.backward(create_graph=create_graph)
        averager.remove()
        return [p.grad.unique().tolist() for p in (first, second, frozen) if p.grad is not None]

    assert pool("gloo", 2).run(program) == [[[6.0 + 15.0], [6.0], [1.5]]] * 2


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_grad_of_a_frozen_parameter_is_unchanged(backend: str) -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = made(Net)
        frozen = next(model.get_submodule("a").parameters())
        averager = un.GradientAverager(model, comm)
        frozen.requires_grad_(False)
        frozen.grad = mine = torch.full_like(frozen, comm.rank + 1.0)
        found = []
        for fails in (True, False):
            out = model(batches(2, 1)[comm.rank][0])
            if fails:
                last = next(model.get_submodule("c").parameters())
                handle = last.register_post_accumulate_grad_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    out.square().mean().backward()
                handle.remove()
            else:
                out.square().mean().backward()
            assert frozen.grad is mine
            found += frozen.grad.unique().tolist()
        averager.remove()
        return found

    assert pool(backend, 2).run(program) == [[1.0, 1.0], [2.0, 2.0]]
