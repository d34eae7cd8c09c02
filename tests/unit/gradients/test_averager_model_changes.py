"""Changes of a model or its gradients during averaging: detected, with an error that names the remedy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import unisono as un
from unisono.testing import pool


def test_later_conversion_of_the_model_is_explained() -> None:
    def program(comm: un.Communicator) -> None:
        model = nn.Linear(1, 1)
        un.GradientAverager(model, comm)
        with pytest.raises(RuntimeError, match=r"'weight' was torch\.float32 when its averager was created"):
            model.double()(torch.ones(1).double()).sum().backward()

    un.launch(program, 2, "thread")


def test_second_averager_of_a_parameter_is_rejected() -> None:
    def program(comm: un.Communicator) -> float:
        model = nn.Linear(1, 1)
        first = un.GradientAverager(model, comm)
        with pytest.raises(ValueError, match="'parameter 0' is averaged by another GradientAverager"):
            un.GradientAverager([model.bias], comm)
        first.remove()
        with pytest.raises(ValueError, match="'parameter 1' is the result of a computation"):
            un.GradientAverager([model.weight, model.bias * 2], comm)
        un.GradientAverager(model, comm)
        (model(torch.ones(1)) * comm.rank).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    assert un.launch(program, 2, "thread") == [0.5, 0.5]


@pytest.mark.parametrize("part", [False, True])
def test_replaced_parameters_are_detected(part: bool) -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        averager = un.GradientAverager(model, comm)
        twin = copy.deepcopy(model)
        model.load_state_dict(state)
        model[0].load_state_dict(model[0].state_dict(), assign=True) if part else model.load_state_dict(
            state, assign=True
        )
        with pytest.raises(RuntimeError, match=r"remove\(\) on the averager") as caught:
            model(torch.ones(1, 2))
        averager.remove()
        model.load_state_dict(state, assign=True)
        twin.load_state_dict(state, assign=True)
        return str(caught.value)

    for said in un.launch(program, 2, "thread"):
        assert f"'0.weight' (and {1 if part else 3} more) was replaced by a new parameter" in said


@pytest.mark.parametrize("kind", ["layer", "parameter"])
def test_added_parameters_are_detected(kind: str) -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
        averager = un.GradientAverager(model, comm)
        frozen = nn.Linear(3, 3).requires_grad_(False)
        model.append(frozen)
        model(torch.ones(1, 2)).sum().backward()
        if kind == "layer":
            model.append(nn.Linear(3, 3))
        else:
            model[1].weight = nn.Parameter(torch.ones(3, 3))
        with pytest.raises(RuntimeError, match="not averaged") as caught:
            model(torch.ones(1, 2)).sum().backward()
        averager.remove()
        un.GradientAverager(model, comm)
        model(torch.ones(1, 2)).sum().backward()
        return str(caught.value)

    for said in un.launch(program, 2, "thread"):
        assert said.startswith("'3.weight' (and 1 more) was added" if kind == "layer" else "'1.weight' was replaced")


@pytest.mark.parametrize("count", [3, 200])
@pytest.mark.parametrize("how", ["swapped", "turned"])
def test_aliased_gradients_are_rejected(how: str, count: int) -> None:
    """They would be overwritten before they are read. A clone is as good as any other gradient."""

    def program(comm: un.Communicator) -> tuple[str, bool]:
        model = nn.Sequential(nn.Linear(count, count, bias=False), nn.Linear(count, count, bias=False)).double()
        averager = un.GradientAverager(model, comm)
        first, second = model.parameters()

        def step() -> None:
            (first.sum() + 2.0 * second.sum()).backward()

        step()
        if how == "swapped":
            first.grad, second.grad = second.grad, first.grad
        else:
            first.grad = first.grad.t()
        kept = [p.grad.clone() for p in (first, second)]
        with pytest.raises(RuntimeError, match="Assign a clone") as caught:
            step()
        first.grad, second.grad = kept
        step()
        averager.remove()
        found = [p.grad.unique().tolist() for p in (first, second)]
        return str(caught.value), found == ([[3.0], [3.0]] if how == "swapped" else [[2.0], [4.0]])

    for message, right in pool("shm", 3).run(program, size=2):
        assert "p.grad of '0.weight' is memory of the averager for other gradients" in message
        assert right


def changed_while_frozen(comm: un.Communicator, compiler: str, in_place: bool) -> str:
    """No hook of a gradient runs: only the forward can tell of the new layer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    un.GradientAverager(model, comm)
    if in_place:
        model.compile(backend=compiler)
    compiled = model if in_place else torch.compile(model, backend=compiler)
    compiled(torch.ones(1, 2)).sum().backward()
    model.requires_grad_(False)
    model[0] = nn.Sequential(model[0], nn.Linear(2, 2))
    try:
        compiled(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "not noticed"


@pytest.mark.soak
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_layer_added_to_a_frozen_compiled_model_is_explained(compiler: str, in_place: bool) -> None:
    for text in pool("shm", 2, timeout=200.0).run(changed_while_frozen, compiler, in_place):
        assert "'0.1.weight' (and 1 more) was added to the model later" in text
