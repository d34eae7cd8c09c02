"""The programs in docs/examples/parallel: tensor and pipeline parallelism equal one process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import unisono as un
from unisono.testing import pool, run_ranks

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "parallel"
sys.path.insert(0, str(FOLDER))

import pipeline  # noqa: E402
import pipeline_bubble  # noqa: E402
import tensor_parallel  # noqa: E402
import train_tensor_pipeline  # noqa: E402
from transformer import Block, transformer  # noqa: E402

LETTERS, CONTEXT, WIDTH, HEADS = 12, 5, 16, 4
GRID = [(2, 2, 1), (3, 1, 1), (3, 4, 1), (4, 8, 1), (2, 4, 2), (2, 2, 3), (3, 6, 2)]
"""Ranks, microbatches and chunks of pipelines."""


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Ranks that are threads share the cores without further threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def divided_dim(name: str) -> int | None:
    """The dimension along which a parameter of the transformer is divided, or None for a replicated one."""
    if re.search(r"(letter|qkv|up|logits)\.(weight|bias)$", name):
        return 0
    return 1 if re.search(r"(out|down)\.weight$", name) else None


def part(tensor: torch.Tensor, name: str, rank: int, size: int) -> torch.Tensor:
    dim = divided_dim(name)
    return tensor if dim is None else tensor.chunk(size, dim)[rank]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def samples(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    codes, targets = torch.randint(LETTERS, (2, *shape), generator=generator)
    return codes, targets


def whole_transformer(depth: int = 2) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Sequential = transformer(LETTERS, CONTEXT, WIDTH, HEADS, depth)
        return model.double()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def divided_step(comm: un.Communicator, whole: nn.Sequential) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = deepcopy(whole)
    model[0].letter = tensor_parallel.VocabParallelEmbedding(model[0].letter, comm)
    model[-1].logits = tensor_parallel.ColumnParallelLinear(model[-1].logits, comm)
    for block in model[1:-1]:
        tensor_parallel.divide_block(block, comm)
    codes, targets = samples(3, CONTEXT)
    loss = tensor_parallel.vocab_parallel_cross_entropy(model(codes), targets, comm)
    loss.backward()
    return loss.detach(), gradients(model)


def check_divided(results: list[tuple[torch.Tensor, dict[str, torch.Tensor]]], whole: nn.Sequential) -> None:
    model = deepcopy(whole)
    codes, targets = samples(3, CONTEXT)
    loss = functional.cross_entropy(model(codes).flatten(0, 1), targets.flatten())
    loss.backward()
    expected = gradients(model)
    for rank, (found, grads) in enumerate(results):
        assert_same(found, loss.detach())
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert_same(grad, part(expected[name], name, rank, len(results)))


@pytest.mark.parametrize(("backend", "ranks"), [("thread", 1), ("thread", 2), ("sim", 2), ("sim", 4)])
def test_divided_transformer_equals_one_process(backend: str, ranks: int) -> None:
    whole = whole_transformer()
    check_divided(run_ranks(divided_step, ranks, backend, whole), whole)


@pytest.mark.parametrize("name", ["copy_to_ranks", "sum_over_ranks"])
def test_wrong_layers_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tensor_parallel, name, lambda x, comm: x)
    whole = whole_transformer()
    with pytest.raises(AssertionError):
        check_divided(run_ranks(divided_step, 2, "sim", whole), whole)


def test_divided_layers_can_be_differentiated_twice() -> None:
    x, weight = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def of_layers(x: torch.Tensor, first: torch.Tensor, comm: un.Communicator | None) -> torch.Tensor:
        copied = tensor_parallel.copy_to_ranks(x, comm) if comm else x
        y = (copied * first).tanh().sum()
        y = tensor_parallel.sum_over_ranks(y, comm) if comm else y
        (slope,) = torch.autograd.grad(y**2, x, create_graph=True)
        return torch.autograd.grad((slope**2).sum(), x)[0]

    def program(comm: un.Communicator) -> torch.Tensor:
        # Columns differ between ranks; what x adds to each rank's columns is summed.
        part_of = torch.zeros_like(weight)
        part_of[:, comm.rank :: comm.size] = weight[:, comm.rank :: comm.size]
        return of_layers(x.clone().requires_grad_(), part_of, comm)

    expected = of_layers(x.clone().requires_grad_(), weight, None)
    for found in run_ranks(program, 2, "sim"):
        assert_same(found, expected)


def stages(count: int) -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(count)]


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, microbatches, 3, 6, dtype=torch.float64, generator=generator)
    return inputs, targets


def pipeline_step(comm: un.Communicator, microbatches: int, whole: list[nn.Module]) -> tuple[Any, ...]:
    inputs, targets = batch(microbatches)
    chunks = deepcopy(whole[comm.rank :: comm.size])
    pipe = pipeline.Pipeline(chunks, comm, torch.empty(3, 6, dtype=torch.float64))
    for _ in range(2):  # gradients accumulate
        loss = pipe.step(inputs.unbind(), lambda y, i: functional.mse_loss(y, targets[i]))
    return loss, [gradients(chunk) for chunk in chunks], pipe.peak


def check_pipeline(results: list[tuple[Any, ...]], microbatches: int, whole: list[nn.Module]) -> None:
    model = deepcopy(nn.Sequential(*whole))
    inputs, targets = batch(microbatches)
    loss = functional.mse_loss(model(inputs), targets)
    (2 * loss).backward()
    for rank, (found, chunks, _) in enumerate(results):
        assert_same(found, loss.detach())
        for stage, grads in zip(model[rank :: len(results)], chunks, strict=True):
            for name, expected in gradients(stage).items():
                assert_same(grads[name], expected)


@pytest.mark.parametrize("backend", ["thread", "sim"])
@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), GRID)
def test_pipeline_equals_one_process(backend: str, ranks: int, microbatches: int, chunks: int) -> None:
    whole = stages(ranks * chunks)
    results = run_ranks(pipeline_step, ranks, backend, microbatches, whole)
    check_pipeline(results, microbatches, whole)
    if chunks == 1:
        assert [peak for *_, peak in results] == [min(ranks - rank, microbatches) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(1, 3, 1), *GRID, (8, 32, 4)])
def test_schedule_has_each_pass_once_and_backward_after_forward(ranks: int, microbatches: int, chunks: int) -> None:
    for rank in range(ranks):
        actions = pipeline.schedule(rank, ranks, microbatches, chunks)
        place = {(a.forward, a.chunk, a.microbatch): i for i, a in enumerate(actions)}
        assert len(actions) == len(place) == 2 * microbatches * chunks
        for chunk, microbatch in product(range(chunks), range(microbatches)):
            assert place[True, chunk, microbatch] < place[False, chunk, microbatch]


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 1), (4, 8, 1), (8, 4, 1), (4, 8, 2), (2, 8, 4)])
@pytest.mark.parametrize("backward_s", [1.0, 2.0])
def test_bubble_is_that_of_the_formula(ranks: int, microbatches: int, chunks: int, backward_s: float) -> None:
    found, peaks = pipeline_bubble.bubble(ranks, microbatches, chunks, backward_s=backward_s)
    assert found == pytest.approx((ranks - 1) / (chunks * microbatches), rel=0.05)
    if chunks == 1:
        assert peaks == tuple(min(ranks - rank, microbatches) for rank in range(ranks))


def check_training(results: list[Any], whole: nn.Sequential, steps: int) -> None:
    """Compare with a plain loop over whole batches."""
    model = deepcopy(whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in train_tensor_pipeline.batches(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, _ in results:
        assert found == pytest.approx(losses, rel=1e-12, abs=0)
    ways = 1 if len(results) == 1 else 2
    half = len(model) // 2
    for rank, (_, parameters) in enumerate(results):
        layers = (list(model[:half]), list(model[half:]))[rank // 2] if ways == 2 else list(model)
        expected = dict(nn.Sequential(*layers).named_parameters())
        assert parameters.keys() == expected.keys()
        for name, parameter in parameters.items():
            assert_same(parameter, part(expected[name].detach(), name, rank % ways, ways))


def trained(comm: un.Communicator, whole: nn.Sequential, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, stage = train_tensor_pipeline.train(comm, deepcopy(whole), steps)
    return losses, {name: parameter.detach() for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize(("backend", "ranks"), [("thread", 1), ("sim", 4)])
def test_training_equals_one_process(backend: str, ranks: int) -> None:
    whole = train_tensor_pipeline.whole_model()
    check_training(run_ranks(trained, ranks, backend, whole, 2), whole, 2)


def everything(comm: un.Communicator, folder: str, whole: nn.Sequential, layers: list[nn.Module]) -> tuple[Any, ...]:
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    pair = comm.split(comm.rank // 2)
    return (
        divided_step(pair, whole),
        pipeline_step(comm, 8, layers[: comm.size]),
        pipeline_step(comm, 8, layers[: 2 * comm.size]),
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_on_shared_memory(ranks: int) -> None:
    whole, layers = whole_transformer(), stages(2 * ranks)
    divided, plain, interleaved = zip(*pool("shm", ranks).run(everything, str(FOLDER), whole, layers), strict=True)
    check_divided(list(divided[:2]), whole)
    check_pipeline(list(plain), 8, layers[:ranks])
    check_pipeline(list(interleaved), 8, layers)


def training_on_shared_memory(comm: un.Communicator, folder: str, whole: nn.Sequential) -> tuple[Any, ...]:
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    return trained(comm, whole, 2)


@pytest.mark.soak
def test_training_on_shared_memory() -> None:
    whole = train_tensor_pipeline.whole_model()
    check_training(pool("shm", 4).run(training_on_shared_memory, str(FOLDER), whole), whole, 2)


def test_errors() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match=r"dimension 0 of \(7, 4\) cannot be divided evenly by 2 ranks"):
            tensor_parallel.ColumnParallelLinear(nn.Linear(4, 7), comm)
        with pytest.raises(ValueError, match="3 attention heads cannot be divided evenly by 2 ranks"):
            tensor_parallel.divide_block(Block(12, 3), comm)
        embedding = tensor_parallel.VocabParallelEmbedding(nn.Embedding(8, 4), comm)
        for code in (-1, 8):
            with pytest.raises(IndexError, match=f"codes must be 0 to 7, not {code} to {code}"):
                embedding(torch.tensor([code]))
        pipe = pipeline.Pipeline([nn.Identity()] * 2, comm, torch.empty(1))
        with pytest.raises(ValueError, match="interleaving takes a multiple of 2 ranks as microbatches, not 3"):
            pipe.step([torch.ones(1)] * 3, lambda y, _: y.sum())
        with pytest.raises(ValueError, match="at least one microbatch, not 0"):
            pipe.step([], lambda y, _: y.sum())

    def alone(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match="one rank runs its layers as one chunk, not as 2"):
            pipeline.Pipeline([nn.Identity()] * 2, comm, torch.empty(1))

    run_ranks(program, 2)
    run_ranks(alone, 1)


def test_stage_of_another_shape_is_an_error() -> None:
    def program(comm: un.Communicator) -> None:
        pipe = pipeline.Pipeline([nn.Flatten(0)], comm, torch.empty(2, 3))
        pipe.step([torch.ones(2, 3)] * 2, lambda y, _: y.sum())

    with pytest.raises(ValueError, match=r"stage 0 returned \(6,\), not \(2, 3\)"):
        run_ranks(program, 2, "sim")


def test_programs_are_short() -> None:
    assert all(len(path.read_text().splitlines()) < 200 for path in FOLDER.glob("*.py"))


@pytest.mark.soak
def test_as_scripts() -> None:
    script = str(FOLDER / "train_tensor_pipeline.py")
    losses = []
    for words in ([script], ["-m", "unisono", "run", "-n", "4", script]):
        ended = subprocess.run(
            [sys.executable, "-W", "error", *words], check=False, capture_output=True, text=True, timeout=240
        )
        assert ended.returncode == 0, ended.stderr
        losses.append(re.findall(r"step \d+: loss [\d.]+", ended.stdout))
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
