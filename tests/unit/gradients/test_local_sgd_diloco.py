"""DiLoCo against its own formula, local SGD and synchronous SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as un
from unisono.errors import MismatchError
from unisono.gradients.local_sgd import DiLoCo, LocalSGD
from unisono.testing import run_ranks

STEPS = 12


def weights() -> list[torch.Tensor]:
    """One contiguous, one not, one empty, one of no dimensions, a complex one; the same on all ranks."""
    given = [torch.linspace(-1, 1, 6), torch.ones(3, 4)[:, ::2].t(), torch.zeros(0), torch.tensor(0.5)]
    pair = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128)
    return [*(w.double().requires_grad_() for w in given), pair.requires_grad_()]


def slope(weight: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    way = weight.detach() * (rank + 1) + step
    # The sine of a complex number grows without bounds.
    return torch.view_as_complex(torch.view_as_real(way).sin()) if way.is_complex() else way.sin()


def train(parameters: list[torch.Tensor], rank: int, steps: range, after: Callable[[], object]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    for step in steps:
        for weight in parameters:
            weight.grad = slope(weight, rank, step)
        optimizer.step()
        after()


def by_hand(size: int, n: int, lr: float, momentum: float, nesterov: bool) -> list[torch.Tensor]:
    """The paper's algorithm in one loop, with the formula of momentum written out."""
    ranks = [weights() for _ in range(size)]
    optimizers = [torch.optim.SGD(w, lr=0.1, momentum=0.5) for w in ranks]
    anchor = [w.detach().clone() for w in weights()]
    velocity = [torch.zeros_like(w) for w in anchor]
    for step in range(STEPS):
        for rank, (parameters, optimizer) in enumerate(zip(ranks, optimizers, strict=True)):
            for weight in parameters:
                weight.grad = slope(weight, rank, step)
            optimizer.step()
        if (step + 1) % n:
            continue
        for i, there in enumerate(anchor):
            way = sum(there - parameters[i].detach() for parameters in ranks) / size
            velocity[i] = momentum * velocity[i] + way
            anchor[i] = there - lr * (way + momentum * velocity[i] if nesterov else velocity[i])
            for parameters in ranks:
                parameters[i].data.copy_(anchor[i])
    return [w.detach() for w in ranks[0]]


def largest(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True) if a.numel())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("lr", "momentum", "nesterov"), [(0.7, 0.9, True), (0.7, 0.9, False), (0.3, 0.0, False)])
def test_matches_the_published_algorithm(size: int, lr: float, momentum: float, nesterov: bool) -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor]:
        parameters = weights()
        with DiLoCo(parameters, comm, 4, lr, momentum, nesterov, bucket_cap_mb=40 / 2**20) as diloco:
            train(parameters, comm.rank, range(STEPS), diloco.step)
        return [w.detach() for w in parameters]

    found = run_ranks(program, size)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert largest(found[0], by_hand(size, 4, lr, momentum, nesterov)) < 1e-12


def test_full_step_without_momentum_is_local_sgd() -> None:
    def program(comm: un.Communicator) -> float:
        first, second = weights(), weights()
        plain = DiLoCo(first, comm, 3, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
        train(first, comm.rank, range(STEPS), plain.step)
        train(second, comm.rank, range(STEPS), LocalSGD(second, comm, 3).step)
        return largest([w.detach() for w in first], [w.detach() for w in second])

    assert max(run_ranks(program, 3)) < 1e-12


def test_ranks_are_independent_between_outer_steps() -> None:
    def program(comm: un.Communicator) -> tuple[float, float, list[float]]:
        weight = torch.zeros(2, requires_grad=True)
        diloco = DiLoCo([weight], comm, every=100)
        train([weight], comm.rank, range(3), diloco.step)
        apart, anchor = weight[0].item(), diloco.anchor[0].tolist()
        diloco.outer_step()
        return apart, weight[0].item(), anchor

    (first, together, anchor), (second, too, _) = run_ranks(program, 2)
    assert first != second
    assert together == too
    assert anchor == [0.0, 0.0]


def test_another_outer_optimizer() -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = torch.zeros(3, requires_grad=True)
        diloco = DiLoCo([weight], comm, every=1, outer=lambda anchor: torch.optim.Adagrad(anchor, lr=0.5))
        with torch.no_grad():
            weight += torch.tensor([1.0, -2.0, 0.0]) * (comm.rank + 1)
        diloco.step()
        return weight.tolist()

    # Adagrad's first step is lr in the direction of the gradient, however long that is.
    for found in run_ranks(program, 2):
        assert found == pytest.approx([0.5, -0.5, 0.0])


def test_state_dict_resumes() -> None:
    def program(comm: un.Communicator) -> float:
        whole = weights()
        train(whole, comm.rank, range(STEPS), DiLoCo(whole, comm, 4).step)
        halves: list[torch.Tensor] = weights()
        before = DiLoCo(halves, comm, 4)
        optimizer = torch.optim.SGD(halves, lr=0.1, momentum=0.5)

        def run(diloco: DiLoCo, steps: range) -> None:
            for step in steps:
                for weight in halves:
                    weight.grad = slope(weight, comm.rank, step)
                optimizer.step()
                diloco.step()

        # Six steps: in the middle between two outer ones.
        run(before, range(6))
        state: dict[str, Any] = before.state_dict()
        with torch.no_grad():
            moved = [w.clone() for w in halves]
            for weight, start in zip(halves, weights(), strict=True):
                weight.copy_(start)
            after = DiLoCo(halves, comm, 4)
            for weight, there in zip(halves, moved, strict=True):
                weight.copy_(there)
        after.load_state_dict(state)
        run(after, range(6, STEPS))
        return largest([w.detach() for w in halves], [w.detach() for w in whole])

    assert run_ranks(program, 2) == [0.0, 0.0]


def test_state_of_another_model_is_rejected() -> None:
    def program(comm: un.Communicator) -> None:
        state = DiLoCo([("a", torch.zeros(2)), ("b", torch.zeros(3))], comm).state_dict()
        diloco = DiLoCo([("a", torch.zeros(2)), ("b", torch.zeros(4))], comm)
        with pytest.raises(ValueError, match=r"'b' has shape \(3,\) in it, \(4,\) here"):
            diloco.load_state_dict(state)
        assert diloco.steps == 0

    run_ranks(program, 1)


def test_rejected_outer_optimizer_state_changes_nothing() -> None:
    def program(comm: un.Communicator) -> None:
        diloco = DiLoCo([("a", torch.zeros(2))], comm)
        state = {**diloco.state_dict(), "steps": 3, "anchor": {"a": torch.ones(2)}}
        state["outer"] = {**state["outer"], "param_groups": []}
        with pytest.raises(ValueError, match="parameter group"):
            diloco.load_state_dict(state)
        assert diloco.steps == 0
        assert diloco.anchor[0].tolist() == [0.0, 0.0]

    run_ranks(program, 1)


def test_ranks_must_start_with_equal_parameters() -> None:
    def program(comm: un.Communicator) -> None:
        model = torch.nn.Linear(2, 2, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(comm.rank / 4)
        with pytest.raises(MismatchError, match=r"'bias': .* \(by up to 0.5\).*broadcast_parameters"):
            DiLoCo(model, comm)
        un.broadcast_parameters(model, comm)
        DiLoCo(model, comm).outer_step()

    run_ranks(program, 3)


def test_integer_and_frozen_parameters_are_unchanged() -> None:
    def program(comm: un.Communicator) -> tuple[list[int], list[float]]:
        index = torch.nn.Parameter(torch.tensor([comm.rank]), requires_grad=False)
        frozen = torch.nn.Parameter(torch.tensor([0.1, -0.0, 1e-30]), requires_grad=False)
        diloco = DiLoCo([index, frozen], comm, every=1)
        diloco.step()
        return index.tolist(), frozen.view(torch.int32).tolist()

    bits = torch.tensor([0.1, -0.0, 1e-30]).view(torch.int32).tolist()
    assert run_ranks(program, 3) == [([rank], bits) for rank in range(3)]


def test_bad_arguments_send_nothing() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match="momentum"):
            DiLoCo([torch.zeros(1)], comm, outer_momentum=0.0)
        with pytest.raises(ValueError, match="at least 1 step"):
            DiLoCo([torch.zeros(1)], comm, every=0)
        comm.barrier()
        with pytest.raises(MismatchError, match=r"'outer'\]: rank 0: 'SGD\(lr=0.0, .*; rank 1: 'SGD\(lr=1.0"):
            DiLoCo([torch.zeros(1)], comm, outer_lr=float(comm.rank))

    run_ranks(program, 2)
