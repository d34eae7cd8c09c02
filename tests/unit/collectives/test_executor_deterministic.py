"""With deterministic=True a sum is one balanced binary tree: the same bits by any algorithm, chunk and transport."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from pairwise import short

import unisono as un
from unisono.gradients import LogicalShards
from unisono.testing import pool

COUNT = 1001


def part(rank: int, dtype: torch.dtype = torch.float32, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The definition: the first half is the longer one; each addition is rounded in the parts' dtype."""
    if len(parts) == 1:
        return parts[0]
    half = -(-len(parts) // 2)
    return tree(parts[:half]) + tree(parts[half:])


def total(comm: un.Communicator, algorithm: str | None, dtype: torch.dtype, op: str = "sum") -> torch.Tensor:
    tensor = part(comm.rank, dtype)
    comm.all_reduce(tensor, op, algorithm=algorithm)
    return tensor


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
RANKS = [1, 2, 3, 5, 6, 8]


@short("ranks, dtype", product(RANKS, DTYPES), list(zip(RANKS, DTYPES * 2, strict=True)))
def test_sum_is_the_balanced_tree(ranks: int, dtype: torch.dtype) -> None:
    expected = tree([part(rank, dtype) for rank in range(ranks)])
    for algorithm in [None, *un.algorithms.serving("all_reduce", ranks, balanced=True)]:
        for chunk_bytes in (400, 1 << 20):
            settings = {"deterministic": True, "chunk_bytes": chunk_bytes}
            found = un.launch(total, ranks, "thread", (algorithm, dtype), **settings)
            assert all(torch.equal(result, expected) for result in found), algorithm


def test_mean_divides_the_sum() -> None:
    expected = tree([part(rank) for rank in range(3)]) / 3
    found = un.launch(total, 3, "thread", (None, torch.float32, "avg"), deterministic=True)
    assert all(torch.equal(result, expected) for result in found)


@pytest.mark.parametrize("root", [0, 2])
def test_reduce_has_the_same_order_for_each_root(root: int) -> None:
    def program(comm: un.Communicator) -> torch.Tensor:
        tensor = part(comm.rank)
        comm.reduce(tensor, root)
        return tensor

    found = un.launch(program, 4, "thread", deterministic=True)
    assert torch.equal(found[root], tree([part(rank) for rank in range(4)]))


def test_reduce_scatter_has_the_same_order() -> None:
    def program(comm: un.Communicator) -> torch.Tensor:
        output = torch.empty(COUNT)
        comm.reduce_scatter_single(output, part(comm.rank, count=3 * COUNT))
        return output

    found = un.launch(program, 3, "thread", deterministic=True)
    assert torch.equal(torch.cat(found), tree([part(rank, count=3 * COUNT) for rank in range(3)]))


@pytest.mark.parametrize("algorithm", ["ring", pytest.param("native", marks=pytest.mark.soak)])
def test_other_order_is_refused_with_those_that_keep_it(algorithm: str) -> None:
    listed = ", ".join(un.algorithms.serving("all_reduce", 2, balanced=True))
    expected = (
        f"{algorithm!r} does not keep the balanced tree of sums, which deterministic=True asks for; known: {listed}"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        un.launch(
            total, 2, "shm" if algorithm == "native" else "thread", (algorithm, torch.float32), deterministic=True
        )


def test_exact_sums_may_use_any_algorithm() -> None:
    def program(comm: un.Communicator) -> list[int]:
        tensor = torch.tensor([comm.rank, 1])
        comm.all_reduce(tensor, algorithm="ring")
        return tensor.tolist()

    assert un.launch(program, 3, "thread", deterministic=True) == [[3, 3]] * 3


def test_groups_inherit_it() -> None:
    def program(comm: un.Communicator) -> str:
        part_of_it = comm.split(0)
        with pytest.raises(ValueError, match="does not keep the balanced tree"):
            part_of_it.all_reduce(torch.ones(2), algorithm="ring")
        plain = comm.dup(deterministic=False)
        plain.all_reduce(torch.ones(2), algorithm="ring")
        return "both"

    assert un.launch(program, 2, "thread", deterministic=True) == ["both"] * 2


# -- gradients -------------------------------------------------------------------------------------
def trained(comm: un.Communicator, shards: int | None, dtype: torch.dtype, settings: dict[str, Any]) -> torch.Tensor:
    """Weights after some steps; each shard has its own data, which depend on the number of the shard only."""
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(part(100 + number, dtype, parameter.numel()).view(parameter.shape))
    averager: un.GradientAverager | LogicalShards
    if shards is None:
        averager = un.GradientAverager(model, comm, deterministic=True, **settings)
    else:
        averager = LogicalShards(model, comm, shards, **settings)
    numbers = averager.local if isinstance(averager, LogicalShards) else [comm.rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for number in reversed(numbers):
            x = part(1000 * step + number, dtype, 35).view(5, 7)
            with averager.shard(number) if isinstance(averager, LogicalShards) else nullcontext():
                model(x).square().mean().backward()
        optimizer.step()
    averager.remove()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@short(
    "shards, sizes, dtype",
    [(*case, dtype) for case in [(8, (2, 4, 8)), (6, (2, 3, 6)), (5, (5,))] for dtype in DTYPES[:2]],
    [(8, (2, 4, 8), torch.bfloat16), (6, (2, 3, 6), torch.float32), (5, (5,), torch.float32)],
)
def test_bits_do_not_depend_on_the_number_of_ranks(shards: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    [alone] = un.launch(trained, 1, "thread", (shards, dtype, {}))
    for size in sizes:
        found = un.launch(trained, size, "thread", (shards, dtype, {}))
        assert all(torch.equal(weights, alone) for weights in found), size


def test_one_shard_a_rank_equals_hooks() -> None:
    by_shards = un.launch(trained, 3, "thread", (3, torch.float32, {}))
    by_hooks = un.launch(trained, 3, "thread", (None, torch.float32, {}))
    assert torch.equal(by_shards[0], by_hooks[2])


def in_pool(comm: un.Communicator, configuration: tuple[str | None, float, str]) -> tuple[torch.Tensor, torch.Tensor]:
    algorithm, bucket_cap_mb, average = configuration
    with comm.dup(deterministic=True) as fixed:
        settings = {"bucket_cap_mb": bucket_cap_mb, "average": average}
        return total(fixed, algorithm, torch.float32), trained(fixed, None, torch.float32, settings)


@pytest.mark.parametrize(
    ("backend", "configurations"),
    [
        ("thread", 4),
        *(pytest.param(backend, 70, marks=pytest.mark.soak) for backend in ("thread", "gloo", "shm")),
    ],
)
def test_random_configurations_give_the_same_bits(backend: str, configurations: int) -> None:
    chance, ranks = Random(f"{backend} {configurations}"), 3
    expected = tree([part(rank) for rank in range(ranks)])
    [weights, *_] = un.launch(trained, ranks, "sim", (None, torch.float32, {}))
    for _ in range(configurations):
        algorithm = chance.choice([None, *un.algorithms.serving("all_reduce", ranks, balanced=True)])
        chosen = algorithm, chance.choice([0.0001, 0.0002, 0.001, 25.0]), "mean"
        for found in pool(backend, ranks, chunk_bytes=chance.choice([64, 1000, 1 << 20])).run(in_pool, chosen):
            assert torch.equal(found[0], expected), chosen
            assert torch.equal(found[1], weights), chosen


def on_shards(comm: un.Communicator, misuse: Any) -> None:
    model = torch.nn.Linear(2, 1)
    averager = LogicalShards(model, comm, 4)
    misuse(averager, lambda: model(torch.ones(1, 2)).sum().backward())


def twice(averager: LogicalShards, backward: Any) -> None:
    for _ in range(2):
        with averager.shard(1):
            backward()


def of_another_rank(averager: LogicalShards, backward: Any) -> None:
    with averager.shard(4):
        backward()


def nested(averager: LogicalShards, backward: Any) -> None:
    with averager.shard(0), averager.shard(1):
        backward()


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda averager, backward: backward(), RuntimeError, "backward.. ran outside of a logical shard"),
        (twice, ValueError, "shard 1 has a gradient in this step already"),
        (of_another_rank, ValueError, "shard 4 is not one of this rank, which has shards 0 to 3"),
        (nested, RuntimeError, r"shard\(1\) was called inside shard\(0\)"),
    ],
)
def test_misuse_of_shards_is_refused(misuse: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        un.launch(on_shards, 1, "thread", (misuse,))


def test_failed_shard_can_be_repeated() -> None:
    def program(comm: un.Communicator) -> list[float]:
        w = torch.zeros(1, requires_grad=True)
        averager = LogicalShards([w], comm, 4)
        for number in averager.local:
            with suppress(KeyError), averager.shard(number):
                (w * 100).sum().backward()
                raise KeyError
            with averager.shard(number):
                (w * number).sum().backward()
        return w.grad.tolist()

    assert un.launch(program, 2, "thread") == [[1.5]] * 2


def test_shards_move_to_other_ranks_and_sum_and_share_buffers() -> None:
    def program(comm: un.Communicator) -> tuple[list[float], list[float], dict[str, Any], str]:
        model = torch.nn.Linear(1, 1, bias=False)
        model.register_buffer("seen", torch.zeros(1))
        shards = LogicalShards(model, comm, 4, average="sum", broadcast_buffers=True)
        with pytest.raises(ValueError, match="'weight' is averaged by another LogicalShards"):
            un.GradientAverager(model, comm)
        pair = comm.split(comm.rank // 2)
        shards.move_to(pair)
        for number in shards.local:
            model.seen.fill_(comm.rank)
            with shards.shard(number):
                (model.weight * number).sum().backward()
        state = shards.state_dict()
        text = repr(shards)
        shards.remove()
        un.GradientAverager(model, pair).remove()
        return model.weight.grad.flatten().tolist(), model.seen.tolist(), state, text

    found = un.launch(program, 4, "thread")
    assert [gradient for gradient, *_ in found] == [[6.0]] * 4
    assert [seen for _, seen, *_ in found] == [[0.0], [0.0], [2.0], [2.0]]
    assert found[3][2:] == ({"steps": 1}, "<LogicalShards 2 to 3 of 4, rank 1 of 2>")


def test_parameter_added_before_the_end_of_a_shard_is_refused() -> None:
    def program(comm: un.Communicator) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        shards = LogicalShards(model, comm, 1)
        with shards.shard(0):
            model.append(torch.nn.Linear(1, 1))

    with pytest.raises(RuntimeError, match=r"'1.weight' \(and 1 more\) was added to the model"):
        un.launch(program, 1, "thread")


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be a positive multiple of the 2 ranks, not 3"):
        un.launch(lambda comm: LogicalShards(torch.nn.Linear(1, 1), comm, 3), 2, "thread")
    with pytest.raises(ValueError, match="average must be 'mean' or 'sum', not 'median'"):
        un.launch(lambda comm: LogicalShards(torch.nn.Linear(1, 1), comm, 2, average="median"), 2, "thread")
    with pytest.raises(ValueError, match="compressed gradients are not summed in the balanced tree"):
        un.launch(
            lambda comm: un.GradientAverager(torch.nn.Linear(1, 1), comm, deterministic=True, compression="fp16"),
            2,
            "thread",
        )
