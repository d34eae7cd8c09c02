"""Bugs that people write for torch.distributed: a short test on ranks finds each, on at most two ranks.

Each test states what must hold on every rank for the values of all, `values[dist.get_rank()]` being the rank's own.
Hypothesis draws the values, and so the number of ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.utils.data import DistributedSampler

import unisono as un

Values = list[int]
Test = Callable[[Values], None]

VALUES = st.lists(st.integers(-5, 5), min_size=1, max_size=4)
BUGS: dict[str, tuple[Test, Test]] = {}
"""By name, the test of the right code and that of the wrong one."""


def rank() -> int:
    return dist.get_rank()


def last() -> int:
    return dist.get_world_size() - 1


def mine(values: Values) -> torch.Tensor:
    return torch.tensor([float(values[rank()])])


def planted(right: Any, wrong: Any) -> Callable[[Callable[[Any, Values], None]], Test]:
    """Register a test of some code, of which there is a right version and a wrong one."""

    def add(test: Callable[[Any, Values], None]) -> Test:
        BUGS[test.__name__] = (lambda values: test(right, values)), (lambda values: test(wrong, values))
        return BUGS[test.__name__][0]

    return add


# -- who calls ---------------------------------------------------------------------------------------
def summed(t: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(t)
    return t


def summed_where_positive(t: torch.Tensor) -> torch.Tensor:
    if t.item() >= 0:
        dist.all_reduce(t)
    return t


@planted(summed, summed_where_positive)
def collective_behind_a_condition(total: Any, values: Values) -> None:
    assert total(mine(values)).item() == sum(values)


def step_of_each_batch(batches: int, longest: int) -> int:
    for number in range(longest):
        summed(torch.tensor([float(number < batches)]))
    return longest


def step_of_own_batches(batches: int, longest: int) -> int:
    for _ in range(batches):
        summed(torch.ones(1))
    return batches


@planted(step_of_each_batch, step_of_own_batches)
def unequal_numbers_of_batches(train: Any, values: Values) -> None:
    batches = [abs(value) for value in values]
    assert train(batches[rank()], max(batches)) == max(batches)


def stop_together(loss: torch.Tensor) -> bool:
    return bool(summed((loss < 0).float()).item())


def stop_alone(loss: torch.Tensor) -> bool:
    return bool(loss.item() < 0)


@planted(stop_together, stop_alone)
def early_stop_decided_by_each_rank(stops: Any, values: Values) -> None:
    stopped = stops(mine(values))
    dist.all_gather_object(every := [None] * len(values), stopped)
    assert len(set(every)) == 1


def exchange(t: torch.Tensor) -> torch.Tensor:
    got = torch.empty_like(t)
    works = [dist.isend(t, (rank() + 1) % (last() + 1)), dist.irecv(got, (rank() - 1) % (last() + 1))]
    for work in works:
        work.wait()
    return got


def send_first(t: torch.Tensor) -> torch.Tensor:
    got = torch.empty_like(t)
    dist.send(t, (rank() + 1) % (last() + 1))
    dist.recv(got, (rank() - 1) % (last() + 1))
    return got


@planted(exchange, send_first)
def everybody_sends_first(shift: Any, values: Values) -> None:
    if len(values) > 1:
        assert shift(mine(values)).item() == values[rank() - 1]


# -- groups and roots --------------------------------------------------------------------------------
def sum_of_others(t: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(t, group=group)
    return t


def sum_of_world(t: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(t)
    return t


@planted(sum_of_others, sum_of_world)
def wrong_group(total: Any, values: Values) -> None:
    group = dist.new_group(range(1, len(values))) if len(values) > 1 else None
    if rank() > 0:
        assert total(mine(values), group).item() == sum(values[1:])


def from_last(t: torch.Tensor, group: Any) -> torch.Tensor:
    dist.broadcast(t, last(), group=group)
    return t


def from_group_rank(t: torch.Tensor, group: Any) -> torch.Tensor:
    dist.broadcast(t, 0, group=group)
    return t


@planted(from_last, from_group_rank)
def rank_of_the_group_for_that_of_the_world(share: Any, values: Values) -> None:
    group = dist.new_group([last()])
    if rank() == last():
        assert share(mine(values), group).item() == values[-1]


def reduced_everywhere(t: torch.Tensor) -> torch.Tensor:
    dist.reduce(t, 0)
    dist.broadcast(t, 0)
    return t


def reduced_on_one(t: torch.Tensor) -> torch.Tensor:
    dist.reduce(t, 0)
    return t


@planted(reduced_everywhere, reduced_on_one)
def result_of_reduce_read_on_all_ranks(total: Any, values: Values) -> None:
    assert total(mine(values)).item() == sum(values)


# -- arithmetic --------------------------------------------------------------------------------------
def mean_by_count(total: torch.Tensor, count: int) -> float:
    both = summed(torch.cat([total, torch.tensor([float(count)])]))
    return (both[0] / both[1].clamp(min=1)).item()


def mean_by_ranks(total: torch.Tensor, count: int) -> float:
    return (summed(total / max(count, 1)) / dist.get_world_size()).item()


@planted(mean_by_count, mean_by_ranks)
def average_by_the_wrong_number(mean: Any, values: Values) -> None:
    counts = [abs(value) for value in values]
    own = torch.full((1,), float(counts[rank()] * rank()))
    wanted = sum(count * other for other, count in enumerate(counts)) / max(sum(counts), 1)
    assert mean(own, counts[rank()]) == pytest.approx(wanted)


def longest_padded(t: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t


def longest_of_zeros(t: torch.Tensor) -> torch.Tensor:
    every = [torch.zeros(1) for _ in range(last() + 2)]
    dist.all_gather(every[:-1], t)
    return torch.stack(every).amax(0)


@planted(longest_padded, longest_of_zeros)
def maximum_with_a_padded_zero(most: Any, values: Values) -> None:
    assert most(mine(values)).item() == max(values)


def averaged_gradients(model: nn.Linear) -> None:
    for p in model.parameters():
        p.grad = summed(p.grad) / dist.get_world_size()


def added_gradients(model: nn.Linear) -> None:
    for p in model.parameters():
        p.grad = summed(p.grad)


@planted(averaged_gradients, added_gradients)
def gradients_added_and_not_averaged(average: Any, values: Values) -> None:
    model = nn.Linear(1, 1, bias=False)
    model(mine(values)).sum().backward()
    average(model)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(sum(values) / len(values))


# -- what is alike and what is not -------------------------------------------------------------------
def broadcast_start(model: nn.Linear) -> None:
    for p in model.parameters():
        dist.broadcast(p.data, 0)


def own_start(model: nn.Linear) -> None:
    """Rely on it that all ranks have drawn the same weights."""


@planted(broadcast_start, own_start)
def weights_that_differ_at_the_start(prepare: Any, values: Values) -> None:
    torch.manual_seed(rank())
    prepare(model := nn.Linear(1, 1))
    dist.all_gather_object(every := [None] * len(values), model.weight.item())
    assert len(set(every)) == 1


def seed_by_rank() -> None:
    torch.manual_seed(rank())


def seed_alike() -> None:
    torch.manual_seed(0)


@planted(seed_by_rank, seed_alike)
def same_seed_on_all_ranks(seed: Any, values: Values) -> None:
    seed()
    dist.all_gather_object(noise := [None] * len(values), torch.rand(()).item())
    assert len(set(noise)) == len(values)


def all_of_it(data: Values) -> list[int]:
    sampler = DistributedSampler(range(len(data)), shuffle=False)
    return list(sampler)[: len(range(rank(), len(data), last() + 1))]


def with_repeats(data: Values) -> list[int]:
    return list(DistributedSampler(range(len(data)), shuffle=False))


@planted(all_of_it, with_repeats)
def samples_of_the_padding_counted_twice(part: Any, values: Values) -> None:
    data = list(range(abs(values[0]) + 1))
    dist.all_gather_object(every := [None] * len(values), part(data))
    assert sorted(chain.from_iterable(every)) == data


# -- when --------------------------------------------------------------------------------------------
def change_after_wait(t: torch.Tensor) -> torch.Tensor:
    total = t.clone()
    dist.all_reduce(total, async_op=True).wait()
    t.zero_()
    return total


def change_before_wait(t: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(t, async_op=True)
    t += 1.0
    work.wait()
    return t


@planted(change_after_wait, change_before_wait)
def tensor_changed_before_the_wait(total: Any, values: Values) -> None:
    assert total(mine(values)).item() == sum(values)


def read_after_wait(t: torch.Tensor, got: torch.Tensor) -> float:
    work = dist.irecv(got, 0) if rank() else dist.isend(t, last())
    work.wait()
    return got.item()


def read_before_wait(t: torch.Tensor, got: torch.Tensor) -> float:
    work = dist.irecv(got, 0) if rank() else dist.isend(t, last())
    found = got.item()
    work.wait()
    return found


@planted(read_after_wait, read_before_wait)
def buffer_read_before_the_wait(receive: Any, values: Values) -> None:
    if last() and rank() in (0, last()):
        found = receive(mine(values), torch.tensor([float("nan")]))
        assert rank() == 0 or found == values[0]


def barrier() -> None:
    dist.barrier()


def no_barrier() -> None:
    """Read at once."""


FOLDER = tempfile.TemporaryDirectory(prefix="planted")


@planted(barrier, no_barrier)
def file_read_before_it_is_there(wait: Any, values: Values) -> None:
    dist.broadcast_object_list(name := [f"{FOLDER.name}/{len(list(Path(FOLDER.name).iterdir()))}"], last())
    if rank() == 0:
        Path(name[0]).write_text(str(values[0]))
    wait()
    assert Path(name[0]).read_text() == str(values[0])


def in_order_of_ranks(t: torch.Tensor) -> list[float]:
    every = [torch.empty(1) for _ in range(last() + 1)]
    dist.all_gather(every, t)
    return [one.item() for one in every]


def in_order_of_arrival(t: torch.Tensor) -> list[float]:
    found = []
    for _ in range(last() + 1):
        found.append(t.clone())
        t = exchange(t) if last() else t
    return [one.item() for one in found]


@planted(in_order_of_ranks, in_order_of_arrival)
def order_of_arrival_for_that_of_ranks(gather: Any, values: Values) -> None:
    assert gather(mine(values)) == values


# -- the tests ---------------------------------------------------------------------------------------
def smallest_failure(test: Test) -> tuple[int, str]:
    """Return the number of ranks of the smallest example that fails, and the error's text; (0, "") if none fails.

    Ranks take turns: a hang shows at once, and a race by its seed.
    """
    sizes = [0]

    @settings(max_examples=12, derandomize=True, database=None, deadline=None)
    @given(values=VALUES, seed=st.integers(0, 9))
    def on_ranks(values: Values, seed: int) -> None:
        try:
            un.testing.torch_ranks(len(values), "sim", seed=seed, timeout=5).run(test, values)
        except Exception:
            # Whatever the wrong code ends by is a failure: Hypothesis gets it, and makes the example smaller.
            sizes.append(len(values))
            raise

    try:
        on_ranks()
    except Exception as error:
        # Of the smallest example: its kind is the bug's.
        return sizes[-1], str(error)
    return sizes[-1], ""


QUICK = {"wrong_group", "same_seed_on_all_ranks", "file_read_before_it_is_there"}
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in BUGS]


@pytest.mark.parametrize("name", EACH)
def test_bug_is_found_on_at_most_two_ranks(name: str) -> None:
    right, wrong = BUGS[name]
    assert smallest_failure(right) == (0, "")
    size, text = smallest_failure(wrong)
    print(f"{name}: {size} ranks: {text}")
    assert 1 <= size <= 2
