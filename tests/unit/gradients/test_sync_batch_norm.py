"""SyncBatchNorm on several ranks is torch's BatchNorm on one that has all batches."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from pairwise import pairwise

import unisono as un
from unisono.errors import MismatchError
from unisono.gradients.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from unisono.testing import run_ranks

TORCHS = {
    (): torch.nn.BatchNorm1d,
    (5,): torch.nn.BatchNorm1d,
    (3, 2): torch.nn.BatchNorm2d,
    (2, 3, 2): torch.nn.BatchNorm3d,
}
UNEVEN = [(3,), (4, 2), (1, 0, 5), (0, 7), (1, 1)]
CHANNELS = 4
PARTS = ("output", "gradient of input", "gradient of weight", "gradient of bias", "running mean", "running variance")


def batches(counts: tuple[int, ...], space: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(counts), CHANNELS, *space, dtype=torch.float64, generator=source) * 3 + 100
    return list(whole.split(counts))


def run(norm: torch.nn.Module, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Forward and backward of some inputs with some outer gradients: all `PARTS` of each step."""
    found = []
    for given, outer in steps:
        given = given.clone().requires_grad_()
        norm.zero_grad()
        output = norm(given)
        (output * outer).sum().backward()
        parameters = [p.grad.clone() if p is not None else torch.zeros(1) for p in (norm.weight, norm.bias)]
        running = [torch.zeros(1) if r is None else r.clone() for r in (norm.running_mean, norm.running_var)]
        assert given.grad is not None
        found.append([output.detach(), given.grad, *parameters, *running])
    return found


def steps_of(counts: tuple[int, ...], space: tuple[int, ...]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each rank, its steps."""
    inputs = [batches(counts, space, seed) for seed in range(3)]
    outers = [batches(counts, space, seed) for seed in range(10, 13)]
    return [[(inputs[s][r], outers[s][r].cos()) for s in range(3)] for r in range(len(counts))]


@pairwise(
    counts=UNEVEN,
    space=TORCHS,
    options=[{}, {"momentum": None, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}],
)
def test_equals_batch_norm_on_the_whole_batch(counts: tuple[int, ...], space: tuple[int, ...], options: dict) -> None:
    def program(comm: un.Communicator) -> list[list[torch.Tensor]]:
        norm = SyncBatchNorm(CHANNELS, comm, dtype=torch.float64, **options)
        fill(norm)
        return run(norm, steps_of(counts, space)[comm.rank])

    alone = TORCHS[space](CHANNELS, dtype=torch.float64, **options)
    fill(alone)
    together = steps_of(counts, space)
    joined = [tuple(torch.cat([rank[step][side] for rank in together]) for side in (0, 1)) for step in range(3)]
    wanted, ranks = run(alone, joined), run_ranks(program, len(counts))
    for step in range(3):
        for index, part in enumerate(PARTS):
            each = [rank[step][index] for rank in ranks]
            found = torch.cat(each) if index < 2 else sum(each) if index < 4 else each[0]
            assert torch.allclose(found, wanted[step][index], rtol=0, atol=1e-10), (part, step)
            assert index < 4 or all(torch.equal(e, each[0]) for e in each), f"{part} is not the same on all ranks"


def fill(norm: torch.nn.Module) -> None:
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
            norm.bias.copy_(torch.linspace(-1, 1, CHANNELS))


def test_gradient_equals_finite_differences() -> None:
    """Independent of torch's BatchNorm: moving one element of one rank's input by a little."""

    def loss(comm: un.Communicator, given: torch.Tensor) -> torch.Tensor:
        norm = SyncBatchNorm(2, comm, dtype=torch.float64)
        return (norm(given) * torch.arange(1.0, given.numel() + 1).view_as(given).sin()).sum()

    def program(comm: un.Communicator) -> float:
        given = torch.arange(6.0, dtype=torch.float64).view(3, 2).cos() + comm.rank
        given.requires_grad_()
        loss(comm, given).backward()
        differences = []
        for sign in (1, -1):
            moved = given.detach().clone()
            if comm.rank == 1:
                moved[2, 1] += sign * 1e-5
            total = loss(comm, moved).detach()
            comm.all_reduce(total)
            differences.append(total)
        assert given.grad is not None
        wanted = (differences[0] - differences[1]) / 2e-5
        return float(abs(given.grad[2, 1] - wanted))

    assert run_ranks(program, 2)[1] < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def program(comm: un.Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        norm = SyncBatchNorm(CHANNELS, comm)
        given, outer = steps_of((4, 3), (2, 2))[comm.rank][0]
        given = (given - 100).to(dtype).requires_grad_()
        output = norm(given)
        (output.float() * outer).sum().backward()
        assert given.grad is not None
        assert output.dtype == given.grad.dtype == dtype
        return output.double(), given.grad.double(), norm.weight.grad.double()

    given, outer = (torch.cat([rank[0][side] for rank in steps_of((4, 3), (2, 2))]) for side in (0, 1))
    given = (given - 100).to(dtype).double().requires_grad_()
    alone = torch.nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    output = alone(given)
    (output * outer).sum().backward()
    ranks = run_ranks(program, 2)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(torch.cat([r[0] for r in ranks]), output, atol=near)
    assert torch.allclose(torch.cat([r[1] for r in ranks]), given.grad, atol=near)
    assert torch.allclose(ranks[0][2] + ranks[1][2], alone.weight.grad, atol=10 * near)


def test_large_means_lose_no_digits() -> None:
    """The mean of squares minus the square of the mean would have no digit left."""

    def program(comm: un.Communicator) -> float:
        norm = SyncBatchNorm(1, comm, momentum=1.0)
        norm(torch.tensor([[-1.0], [1.0]]) + 2.0**23)
        return norm.running_var.item()

    assert run_ranks(program, 2) == [pytest.approx(4 / 3)] * 2


def test_evaluation_equals_torch_and_sends_nothing() -> None:
    def program(comm: un.Communicator) -> bool:
        norm, alone = SyncBatchNorm(CHANNELS, comm), torch.nn.BatchNorm1d(CHANNELS)
        given = torch.randn(5, CHANNELS, generator=torch.Generator().manual_seed(comm.rank))
        norm(given)
        alone.load_state_dict(norm.state_dict())
        norm.eval()
        alone.eval()
        # One rank alone: nothing is sent.
        return comm.rank == 0 or torch.equal(norm(given), alone(given))

    assert run_ranks(program, 2) == [True, True]


def network() -> torch.nn.Module:
    torch_layers = [torch.nn.Conv1d(2, 3, 1), torch.nn.BatchNorm1d(3), torch.nn.Flatten(), torch.nn.BatchNorm1d(6)]
    made = torch.nn.Sequential(*torch_layers[:2], torch.nn.Sequential(*torch_layers[2:]), torch.nn.Linear(6, 2))
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter) + index / 10)
    return made.double()


def test_converted_network_trains_like_one_rank() -> None:
    counts = (2, 5, 3)
    inputs = torch.randn(4, sum(counts), 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def train(net: torch.nn.Module, mine: torch.Tensor, average: Callable[[], object], scale: float) -> torch.Tensor:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        for batch in mine:
            optimizer.zero_grad()
            (net(batch).sin().sum() * scale).backward()
            average()
            optimizer.step()
        return torch.cat([t.detach().reshape(-1).double() for t in net.state_dict().values()])

    def program(comm: un.Communicator) -> torch.Tensor:
        net = convert_sync_batchnorm(network(), comm)
        mine = inputs.split(counts, dim=1)[comm.rank]
        found = train(net, mine, lambda: un.average_gradients(net, comm), comm.size / sum(counts))
        un.checkpoint.assert_in_sync(net, comm)
        return found

    wanted = train(network(), inputs, lambda: None, 1 / sum(counts))
    for found in run_ranks(program, 3):
        assert (found - wanted).abs().max() < 1e-10


def test_conversion_keeps_state() -> None:
    def program(comm: un.Communicator) -> None:
        net = network()
        shared = torch.nn.BatchNorm2d(3, eps=0.25, momentum=None, affine=False)
        net.add_module("one", shared)
        net.add_module("two", shared)
        net.add_module("instance", torch.nn.InstanceNorm1d(3, affine=True))
        net[1].eval()
        before, tensors = list(net.state_dict()), {name: id(p) for name, p in net.named_parameters()}
        assert convert_sync_batchnorm(net, comm) is net
        kinds = {name: type(layer).__name__ for name, layer in net.named_modules(remove_duplicate=False)}
        assert [name for name, kind in kinds.items() if kind == "SyncBatchNorm"] == ["1", "2.1", "one", "two"]
        assert kinds["instance"] == "InstanceNorm1d"
        assert net.one is net.two
        assert (net.one.eps, net.one.momentum, net.one.weight, net[1].training) == (0.25, None, None, False)
        assert list(net.state_dict()) == before
        assert {name: id(p) for name, p in net.named_parameters()} == tensors
        layer = net[1]
        assert convert_sync_batchnorm(net, comm)[1] is layer
        assert isinstance(convert_sync_batchnorm(torch.nn.BatchNorm1d(2), comm), SyncBatchNorm)
        torch.nn.Sequential(torch.nn.BatchNorm1d(3)).load_state_dict(
            {f"0.{k}": v for k, v in layer.state_dict().items()}
        )

    run_ranks(program, 2)


def test_copies_work_and_state_dict_can_be_saved() -> None:
    def program(comm: un.Communicator) -> float:
        norm = SyncBatchNorm(2, comm, momentum=1.0)
        twin = copy.deepcopy(norm)
        assert twin.weight is not norm.weight
        twin(torch.full((1, 2), float(comm.rank)))
        torch.save(norm.state_dict(), io.BytesIO())
        assert norm.running_mean[0] == 0
        return twin.running_mean[0].item()

    assert run_ranks(program, 2) == [0.5, 0.5]


def test_empty_batches_change_nothing() -> None:
    def program(comm: un.Communicator) -> tuple[list[float], tuple[int, ...]]:
        norm = SyncBatchNorm(2, comm)
        given = torch.zeros(0, 2, 3, requires_grad=True)
        output = norm(given)
        output.sum().backward()
        assert given.grad is not None
        return [*norm.running_mean.tolist(), *norm.running_var.tolist()], tuple(output.shape)

    assert run_ranks(program, 2) == [([0.0, 0.0, 1.0, 1.0], (0, 2, 3))] * 2


def test_bad_input() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(
            MismatchError, match=r"'layer': rank 0: 'SyncBatchNorm\(2, eps=1e-05.*; rank 1: 'SyncBatchNorm\(3"
        ):
            SyncBatchNorm(2 + comm.rank, comm)
        norm = SyncBatchNorm(2, comm)
        with pytest.raises(ValueError, match="must have 2 channels, not 3"):
            norm(torch.zeros(4, 3))
        with pytest.raises(ValueError, match="at least the dimensions"):
            norm(torch.zeros(4))
        with pytest.raises(ValueError, match="one value per channel on all 2 ranks together"):
            norm(torch.zeros(comm.rank, 2))
        assert norm.running_mean.tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="'1' is lazy"):
            convert_sync_batchnorm(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.LazyBatchNorm1d()), comm)
        with pytest.raises(MismatchError, match=r"'0'\]: rank 0: 'BatchNorm1d\(3, eps=0\.1"):
            convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3, eps=0.1 + comm.rank)), comm)
        # And nothing is broken by any of that.
        norm(torch.zeros(2, 2))
        norm.close()
        comm.barrier()

    run_ranks(program, 2)


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm])
def test_converted_layers_keep_their_hooks(kind: type[torch.nn.Module]) -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = torch.nn.Sequential(kind(1, eps=0.0))
        handle = model[0].register_forward_hook(lambda module, given, output: output * 3)
        model[0].note = "kept"
        model = convert_sync_batchnorm(model, comm)
        assert (type(model[0]), model[0].note) == (SyncBatchNorm, "kept")
        before = model(torch.tensor([[2.0 * comm.rank]])).item()
        handle.remove()
        return [before, model(torch.tensor([[2.0 * comm.rank]])).item()]

    assert run_ranks(program, 2) == [[-3.0, -1.0], [3.0, 1.0]]


class Scaled(torch.nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.24


class Frozen(torch.nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def patched() -> torch.nn.Module:
    layer = torch.nn.BatchNorm1d(2)
    layer.forward = lambda given: given  # type: ignore[method-assign]
    return layer


def parametrized() -> torch.nn.Module:
    layer = torch.nn.BatchNorm1d(2)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Softplus())
    return layer


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Scaled(2), "its own forward"),
        (lambda: Frozen(2), "its own train"),
        (patched, "its own forward"),
        (parametrized, "its own parametrizations"),
    ],
)
def test_layers_with_behaviour_of_their_own_are_refused(make: Callable[[], torch.nn.Module], what: str) -> None:
    def program(comm: un.Communicator) -> None:
        model = torch.nn.Sequential(make(), torch.nn.BatchNorm1d(2))
        with pytest.raises(ValueError, match=f"'0' is a .* with {what}, which a SyncBatchNorm would not have"):
            convert_sync_batchnorm(model, comm)
        assert type(model[1]) is torch.nn.BatchNorm1d
        comm.barrier()

    run_ranks(program, 2)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_whole_model_can_be_saved(how: str) -> None:
    def program(comm: un.Communicator) -> float:
        model = convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(1, momentum=1.0)), comm)
        file = io.BytesIO()
        if how == "torch.save":
            torch.save(model, file)
        else:
            pickle.dump(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False) if how == "torch.save" else pickle.load(file)
        assert loaded.eval()(torch.ones(1, 1)).shape == (1, 1)
        loaded.train()
        with pytest.raises(RuntimeError, match=r"loaded from a file.*convert_sync_batchnorm"):
            loaded(torch.ones(2, 1))
        layer = loaded[0]
        assert convert_sync_batchnorm(loaded, comm)[0] is layer
        loaded(torch.full((1, 1), float(comm.rank)))
        layer.close()
        return float(layer.running_mean)

    assert run_ranks(program, 2) == [0.5, 0.5]
