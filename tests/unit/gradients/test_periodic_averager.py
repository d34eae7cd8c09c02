"""The engine of periodic averaging against each paper's algorithm, on quadratics whose steps have a closed form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from failing_posts import FailedPostError, Posts, run_failing
from pairwise import short

import unisono as un
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.errors import ClosedError, CommError, MismatchError, PeerLostError
from unisono.gradients import DiLoCo, Gossip, LocalSGD, OuterUpdate, PeriodicAverager, SlowMo, every
from unisono.gradients.topology import mixing, ring
from unisono.testing import run_ranks
from unisono.wrappers.base import Wrapper

Array = npt.NDArray[np.float64]
Averager = Callable[[list[tuple[str, torch.Tensor]], un.Communicator, torch.optim.Optimizer], PeriodicAverager]

RATE = 0.1
NAMES = ["first", "second", "third"]
WIDTHS = [4, 3, 5]
CUTS = [4, 7]


class Quadratic:
    """Half of the sum of a (x - c)**2, with other a and c on each rank: k steps of SGD have a closed form."""

    def __init__(self, rank: int) -> None:
        source = np.random.default_rng(rank)
        self.a = source.uniform(0.5, 2.0, sum(WIDTHS))
        self.c = source.normal(size=sum(WIDTHS)) + rank

    def after(self, x: Array, steps: int, rate: float = RATE, place: Any = slice(None)) -> Array:
        """Return the elements at `place` after some steps of SGD from x."""
        return self.c[place] + (1 - rate * self.a[place]) ** steps * (x - self.c[place])


def start() -> Array:
    return np.linspace(-1, 1, sum(WIDTHS))


def train(comm: un.Communicator, make: Averager, steps: int, rates: Callable[[int], float] = lambda _: RATE) -> Array:
    """Train by SGD and an averager; return the parameters after the last step, without what is under way."""
    parameters = [part.requires_grad_() for part in torch.from_numpy(start()).split(WIDTHS)]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    with make(list(zip(NAMES, parameters, strict=True)), comm, optimizer) as averager:
        run(averager, parameters, optimizer, comm.rank, steps, rates)
    return np.concatenate([p.detach().numpy() for p in parameters])


def run(
    averager: PeriodicAverager,
    parameters: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int,
    rates: Callable[[int], float] = lambda _: RATE,
) -> None:
    a, c = (torch.from_numpy(v).split(WIDTHS) for v in (Quadratic(rank).a, Quadratic(rank).c))
    for _ in range(steps):
        optimizer.param_groups[0]["lr"] = rates(averager.steps + 1)
        for parameter, slope, centre in zip(parameters, a, c, strict=True):
            parameter.grad = slope * (parameter.detach() - centre)
        optimizer.step()
        averager.step()


def streaming(
    size: int,
    steps: int,
    interval: int,
    lag: int = 0,
    alpha: float | None = None,
    offsets: list[int] | None = None,
    rate: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
) -> list[Array]:
    """Algorithm 2 of Streaming DiLoCo (2025), fragment by fragment; the elements of a quadratic do not meet.

    Without alpha, a rank goes on from what its own change alone would lead to, and corrects that later.
    """

    def stepped(anchor: Array, velocity: Array, change: Array) -> tuple[Array, Array]:
        velocity = momentum * velocity + change
        return anchor - rate * (change + momentum * velocity if nesterov else velocity), velocity

    ranks = [Quadratic(rank) for rank in range(size)]
    local = [start() for _ in ranks]
    for place, offset in zip(np.split(np.arange(sum(WIDTHS)), CUTS), offsets or [0, 0, 0], strict=True):
        anchor = start()[place]
        velocity = np.zeros_like(anchor)
        last = due = 0
        here = [x[place] for x in local]
        for step in range(1, steps + 1):
            sends = step % interval == offset % interval
            if not (sends or step in (due, steps)):
                continue
            here = [q.after(x, step - last, place=place) for q, x in zip(ranks, here, strict=True)]
            last = step
            if sends:
                change = anchor - np.mean(here, axis=0)
                due = step + lag
                if alpha is None:
                    here = expected = [stepped(anchor, velocity, anchor - x)[0] for x in here]
            if step == due:
                anchor, velocity = stepped(anchor, velocity, change)
                if alpha is None:
                    here = [anchor + (x - old) for x, old in zip(here, expected, strict=True)]
                else:
                    here = [alpha * x + (1 - alpha) * anchor for x in here]
        for x, part in zip(local, here, strict=True):
            x[place] = part
    return local


def largest(found: list[Array], wanted: list[Array]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))


STREAMS = [(6, 0, None), (6, 2, 0.5), (6, 5, 0.25), (6, 3, 0.0), (6, 4, None), (3, 2, 0.5)]


@short(
    "size, interval, lag, alpha",
    [(size, *stream) for size in (1, 2, 4) for stream in STREAMS],
    [(1, 6, 4, None), *((2, *stream) for stream in STREAMS), (4, 6, 4, None), (4, 6, 2, 0.5)],
)
def test_streaming_diloco_is_the_papers(size: int, interval: int, lag: int, alpha: float | None) -> None:
    def make(named: Any, comm: un.Communicator, _: object) -> PeriodicAverager:
        fragments = [[name] for name in NAMES]
        return DiLoCo(named, comm, interval, fragments=fragments, overlap_steps=lag, alpha=alpha)

    offsets = [0, interval // 3, 2 * interval // 3]
    found = run_ranks(lambda comm: train(comm, make, 29), size)
    assert largest(found, streaming(size, 29, interval, lag, alpha, offsets)) < 1e-12


class Counting(torch.optim.SGD):
    """An outer optimizer that counts its steps in its groups, as those without a schedule do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.5 + 0.2 / group["count"]
        super().step(closure)


@pytest.mark.parametrize(
    "outer",
    [
        lambda anchor: torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True),
        lambda anchor: torch.optim.Adam(anchor, lr=0.05),
        lambda anchor: Counting(anchor, lr=0.7, momentum=0.5),
    ],
)
def test_a_lag_changes_nothing_where_ranks_learn_the_same(outer: Any) -> None:
    def program(comm: un.Communicator, lag: int) -> tuple[Array, dict[str, Any]]:
        parameters = [part.requires_grad_() for part in torch.from_numpy(start()).split(WIDTHS)]
        averager = DiLoCo(parameters, comm, 12, outer=outer, fragments=3, overlap_steps=lag)
        # Fragments are sent after steps 4, 8 and so on: none is under way after the last step.
        run(averager, parameters, torch.optim.SGD(parameters, lr=RATE), 0, 35)
        return np.concatenate([p.detach().numpy() for p in parameters]), averager.state_dict()["outer"]

    prompt, state = run_ranks(program, 2, "thread", 0)[0]
    for lag in (1, 3):
        for found, outer_state in run_ranks(program, 2, "thread", lag):
            assert np.abs(found - prompt).max() < 1e-12
            torch.testing.assert_close(outer_state, state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_ranks_are_equal_after_a_lag_in_any_dtype(dtype: torch.dtype) -> None:
    changes = torch.randn(31, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)

    def program(comm: un.Communicator, lag: int, same: bool) -> torch.Tensor:
        weight = torch.ones(5, dtype=dtype)
        diloco = DiLoCo([weight], comm, 8, overlap_steps=lag)
        for change in changes[:, 0 if same else comm.rank]:
            weight += 0.1 * change
            diloco.step()
        diloco.finish()
        return weight

    prompt = run_ranks(program, 3, "thread", 0, True)[0]
    assert torch.equal(run_ranks(program, 3, "thread", 3, True)[2], prompt)
    first, second, third = run_ranks(program, 3, "thread", 3, False)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_what_a_rank_has_learnt_outlives_an_exchange_that_failed() -> None:
    def program(comm: un.Communicator) -> tuple[float, float, float]:
        weight = torch.zeros(1, dtype=torch.float64)
        diloco = DiLoCo([weight], comm, 4, 0.7, 0.9, True, overlap_steps=2)
        for _ in range(4):
            weight += 1
            if comm.rank == 2 and diloco.steps == 3:
                raise KeyError("this rank is gone")
            diloco.step()
        ahead = weight.item()
        weight += 1
        diloco.step()
        weight += 1
        with pytest.raises(PeerLostError):
            diloco.step()
        diloco.move_to(comm.rebuild())
        kept = weight.item()
        diloco.outer_step()
        return ahead, kept, weight.item()

    ends = un.simulate(program, 3, on_failure="continue").results
    # The first step of the outer optimizer takes 0.7 (1 + 0.9) of a change.
    assert ends[:2] == [pytest.approx((1.33 * 4, 6.0, 1.33 * 6))] * 2


NEW: dict[str, Callable[[torch.Tensor, un.Communicator], PeriodicAverager]] = {
    "DiLoCo": lambda weight, comm: DiLoCo([weight], comm, 2, 0.7),
    "streaming DiLoCo": lambda weight, comm: DiLoCo([weight], comm, 2, 0.7, overlap_steps=1),
    "LocalSGD": lambda weight, comm: LocalSGD([weight], comm, 2),
    "Gossip": lambda weight, comm: Gossip([weight], comm),
}


@pytest.mark.parametrize("kind", NEW)
def test_rank_that_joins_creates_its_averager_while_the_others_move(kind: str) -> None:
    def program(comm: un.Communicator) -> tuple[float, float, int]:
        before = comm.split(comm.rank // 2)
        weight = torch.full((1,), 9.0 * (comm.rank == 2), dtype=torch.float64)
        averager = NEW[kind](weight, before if comm.rank < 2 else comm)
        if comm.rank < 2:
            for _ in range(3):
                weight += 1
                averager.step()
            averager.move_to(comm)
        joined = weight.item()
        for _ in range(5):
            weight += comm.rank
            averager.step()
        averager.finish()
        return joined, weight.item(), averager.steps

    (first, *_), (_, common, _), (joined, *_) = ends = run_ranks(program, 3, "thread")
    assert [steps for *_, steps in ends] == [8, 8, 8]
    if "DiLoCo" in kind:
        assert [end for _, end, _ in ends] == [common] * 3
        assert joined == first - 1, "the anchor, without the step since"
    else:
        assert (first, joined) == (3.0, 9.0)


def repeat_failed_average(comm: un.Communicator, posts: Posts, kind: str) -> tuple[bool, list[float], list[float]]:
    """Let rank 1 fail after some messages; return whether this rank did, and its weights then and after a repetition.

    The tensor is so long that ranks sum it in two rounds.
    """
    weight = torch.full((40_000,), float(comm.rank))
    averager = LocalSGD([weight], comm, 1) if kind == "LocalSGD" else Gossip([weight], comm)
    average = averager.step if kind == "LocalSGD" else averager.average
    if comm.rank == 1:
        posts[1] = 1
    failed = False
    try:
        average()
    except (FailedPostError, CommError):
        failed = True
    kept = weight.unique().tolist()
    averager.move_to(comm)
    average()
    return failed, kept, weight.unique().tolist()


@pytest.mark.parametrize("kind", ["LocalSGD", "Gossip"])
def test_failed_average_leaves_no_partial_sums_in_the_parameters(kind: str) -> None:
    found = run_failing(repeat_failed_average, 4, kind)
    assert found[1][0]
    for rank, (failed, kept, _) in enumerate(found):
        # All that some ranks have waited for may have arrived before rank 1 has failed.
        assert kept == [rank if failed else 1.5]
    mean = sum(kept[0] for _, kept, _ in found) / 4
    assert [averaged for _, _, averaged in found] == [[mean]] * 4


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_diloco_is_the_papers(momentum: float, nesterov: bool) -> None:
    def make(named: Any, comm: un.Communicator, _: object) -> PeriodicAverager:
        return DiLoCo(named, comm, 5, 0.6, momentum, nesterov)

    found = run_ranks(lambda comm: train(comm, make, 23), 3)
    wanted = streaming(3, 23, 5, rate=0.6, momentum=momentum, nesterov=nesterov)
    assert largest(found, wanted) < 1e-12


def test_local_sgd_is_the_papers() -> None:
    """A full step of the outer optimizer, without momentum."""
    wanted = streaming(3, 23, 5, rate=1.0, momentum=0.0, nesterov=False)
    assert largest(run_ranks(lambda comm: train(comm, lambda n, c, _: LocalSGD(n, c, 5), 23), 3), wanted) < 1e-12


def test_slowmo_is_the_papers() -> None:
    """Algorithm 1 of SlowMo (2020), with an inner learning rate that falls."""
    interval, alpha, beta, size = 4, 0.8, 0.6, 3

    def rates(step: int) -> float:
        return RATE / (1 + (step - 1) // interval)

    def make(named: Any, comm: un.Communicator, inner: torch.optim.Optimizer) -> PeriodicAverager:
        return DiLoCo(named, comm, interval, outer=lambda anchor: SlowMo(anchor, inner, alpha, beta))

    x = start()
    slow = np.zeros_like(x)
    for turn in range(5):
        rate = rates(turn * interval + 1)
        mean = np.mean([Quadratic(rank).after(x, interval, rate) for rank in range(size)], axis=0)
        slow = beta * slow + (x - mean) / rate
        x = x - alpha * rate * slow
    found = run_ranks(lambda comm: train(comm, make, 5 * interval, rates), size)
    assert largest(found, [x] * size) < 1e-12


@pytest.mark.parametrize("lag", [0, 1])
def test_gossip_is_the_papers(lag: int) -> None:
    """D-PSGD (2017) adds the step of the old parameters to their mix; without lag, the step is mixed as well."""
    size, steps = 4, 12
    weights = np.zeros((size, size))
    for rank, row in enumerate(mixing(ring(size), size)):
        for other, weight in row.items():
            weights[rank, other] = weight
    ranks = [Quadratic(rank) for rank in range(size)]
    x = np.stack([start()] * size)
    for step in range(steps):
        after = np.stack([q.after(x[rank], 1) for rank, q in enumerate(ranks)])
        # The first mix that arrives is of the parameters after the first step.
        x = weights @ after if not lag else after + (weights @ x - x if step else 0)
    make: Averager = lambda named, comm, _: Gossip(named, comm, "ring", overlap_steps=lag)  # noqa: E731
    assert largest(run_ranks(lambda comm: train(comm, make, steps), size), list(x)) < 1e-12


@pytest.mark.parametrize(
    "make",
    [
        lambda named, comm, _: PeriodicAverager(named, comm, 1),
        lambda named, comm, _: DiLoCo(named, comm, 1, 1.0, 0.0, False),
        lambda named, comm, _: DiLoCo(named, comm, 1, 1.0, 0.0, False, fragments=3),
    ],
    ids=["mean", "outer", "fragments"],
)
def test_an_interval_of_one_step_is_ddp(make: Averager) -> None:
    def ddp(comm: un.Communicator) -> Array:
        parameter = torch.from_numpy(start()).requires_grad_()
        averager = un.GradientAverager([parameter], comm)
        optimizer = torch.optim.SGD([parameter], lr=RATE)
        quadratic = Quadratic(comm.rank)
        for _ in range(15):
            optimizer.zero_grad()
            (torch.from_numpy(quadratic.a) / 2 * (parameter - torch.from_numpy(quadratic.c)) ** 2).sum().backward()
            optimizer.step()
        averager.remove()
        return parameter.detach().numpy()

    assert largest(run_ranks(lambda comm: train(comm, make, 15), 3), run_ranks(ddp, 3)) < 1e-12


def test_one_fragment_without_lag_or_codec_is_plain_diloco_bit_for_bit() -> None:
    def drift(parameters: list[torch.Tensor], rank: int, step: int) -> None:
        for parameter in parameters:
            parameter.data.sub_(0.01 * (parameter.data * (rank + 1) + step).sin())

    def plain(comm: un.Communicator) -> list[list[float]]:
        """DiLoCo in ten lines."""
        torch.manual_seed(1)
        parameters = [torch.randn(7, 3), torch.randn(11)]
        anchor = [p.clone() for p in parameters]
        outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
        for step in range(1, 31):
            drift(parameters, comm.rank, step)
            if step % 5 == 0:
                change = torch.cat([(a - p).view(-1) for a, p in zip(anchor, parameters, strict=True)])
                comm.all_reduce(change, "avg")
                for a, part in zip(anchor, change.split([21, 11]), strict=True):
                    a.grad = part.view(a.shape)
                outer.step()
                for a, p in zip(anchor, parameters, strict=True):
                    p.copy_(a)
        return [p.flatten().tolist() for p in parameters]

    def engine(comm: un.Communicator) -> list[list[float]]:
        torch.manual_seed(1)
        parameters = [torch.randn(7, 3), torch.randn(11)]
        diloco = DiLoCo(parameters, comm, 5, fragments=1, overlap_steps=0)
        for step in range(1, 31):
            drift(parameters, comm.rank, step)
            diloco.step()
        return [p.flatten().tolist() for p in parameters]

    # One pool of ranks each, since threads share torch's generator: every rank seeds it before it draws.
    assert un.testing.pool("gloo").run(engine, size=3) == un.testing.pool("gloo").run(plain, size=3)


def test_a_hundred_small_outer_steps_are_kept_in_bfloat16() -> None:
    """The mean change of a round, 1/128 on one rank of four, is a quarter of what bfloat16 tells from one."""

    def program(comm: un.Communicator, dtype: torch.dtype | None) -> tuple[float, float]:
        weight = torch.ones(3, dtype=torch.bfloat16)
        diloco = DiLoCo([weight], comm, 1, 1.0, 0.0, False, anchor_dtype=dtype)
        for _ in range(100):
            weight += 2**-7 if comm.rank == 0 else 0
            diloco.step()
        return diloco.anchor[0][0].item(), weight[0].item()

    for anchor, weight in run_ranks(program, 4, "thread", None):
        assert anchor == pytest.approx(1 + 100 * 2**-7 / 4, abs=1e-5)
        assert weight == pytest.approx(anchor, abs=2**-8)
    # An anchor of the parameter's dtype, on request, has no trace of them.
    assert run_ranks(program, 4, "thread", torch.bfloat16) == [(1.0, 1.0)] * 4


def test_training_goes_on_while_an_exchange_is_under_way() -> None:
    """Rank 1 begins when rank 0 has made all steps but the last one before the result is due."""

    def program(comm: un.Communicator) -> float:
        weight = torch.full((5,), float(comm.rank))
        averager = PeriodicAverager([weight], comm, 4, overlap_steps=3, alpha=0.0)
        if comm.rank:
            comm.recv(torch.empty(1), 0)
        for step in range(1, 8):
            assert averager.step() is (step == 7)
            if comm.rank == 0 and step == 6:
                comm.send(torch.empty(1), 1)
        return weight[0].item()

    assert run_ranks(program, 2) == [0.5, 0.5]


def test_many_exchanges_are_under_way_in_one_order() -> None:
    """Eight fragments, each of which is under way for most of an interval; ranks begin one after another."""
    shapes = [(3,), (2, 2), (5,), (1,), (4,), (2,), (6,), (3, 3)]

    def program(comm: un.Communicator) -> list[list[float]]:
        parameters = [torch.full(shape, float(comm.rank)) for shape in shapes]
        named = [(str(i), p) for i, p in enumerate(parameters)]
        averager = PeriodicAverager(named, comm, 8, fragments=[[n] for n, _ in named], overlap_steps=7, alpha=0.0)
        if comm.rank:
            comm.recv(torch.empty(1), comm.rank - 1)
        for step in range(1, 33):
            averager.step()
            if step == 7 and comm.rank + 1 < comm.size:
                comm.send(torch.empty(1), comm.rank + 1)
        averager.finish()
        return [p.flatten().tolist() for p in parameters]

    mean = [torch.full(shape, 1.5).flatten().tolist() for shape in shapes]
    assert run_ranks(program, 4) == [mean] * 4


def run_until_raised(step: Callable[[], object]) -> None:
    """Make the two steps of an overlap, of which the last one raises at the latest."""
    step()
    step()


def test_error_of_an_exchange_in_the_background_comes_out_in_a_step_and_names_the_rank() -> None:
    def program(comm: un.Communicator) -> None:
        averager = PeriodicAverager([torch.zeros(3)], comm, 2, overlap_steps=2)
        if comm.rank == 1:
            return
        averager.step()
        averager.step()
        with pytest.raises(PeerLostError) as first:
            run_until_raised(averager.step)
        assert first.value.peer == 1
        assert "while averaging fragment 0, whose result is for step 4" in first.value.__notes__
        with pytest.raises(PeerLostError):
            averager.step()

    assert run_ranks(program, 2, "sim", on_failure="continue") == [None, None]


def test_results_are_applied_early_where_they_are_needed() -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = torch.full((2,), float(comm.rank))
        # Due again before the result is: the warm-up sends after each step.
        averager = PeriodicAverager([weight], comm, every(4, warmup=2), overlap_steps=3)
        seen = []
        for _ in range(2):
            averager.step()
            seen.append(weight[0].item())
        averager.finish()
        return [*seen, weight[0].item()]

    assert run_ranks(program, 2) == [[0.0, 0.5, 0.5], [1.0, 0.5, 0.5]]


@pytest.mark.parametrize("alpha", [None, 0.0, 0.5])
def test_an_exchange_of_all_fragments_now_makes_ranks_equal(alpha: float | None) -> None:
    def program(comm: un.Communicator) -> list[float]:
        weights = [torch.zeros(3), torch.zeros(4)]
        diloco = DiLoCo(weights, comm, 4, 1.0, 0.0, False, fragments=2, overlap_steps=1, alpha=alpha)
        for _ in range(4):
            for weight in weights:
                weight += comm.rank
            diloco.step()
        diloco.outer_step()
        return torch.cat(weights).tolist()

    first, second = run_ranks(program, 2)
    assert first == second
    # Four steps of a half: what rank 1 has learnt on its own, and rank 0 has not, counts once.
    assert alpha is not None or first == [2.0] * 7


@pytest.mark.parametrize("steps", [5, 6, 8])
@pytest.mark.parametrize("compression", [None, "bf16"])
def test_end_of_training_averages_what_was_learnt_since(steps: int, compression: str | None) -> None:
    """The mean of what all ranks have learnt, whenever the fragments were sent."""

    def program(comm: un.Communicator) -> tuple[list[float], list[float]]:
        weights = [torch.zeros(3), torch.zeros(4)]
        how: Any = {"fragments": 2, "overlap_steps": 1, "compression": compression}
        diloco = DiLoCo(weights, comm, 4, outer_lr=1.0, outer_momentum=0.0, nesterov=False, **how)
        for _ in range(steps):
            for weight in weights:
                weight += comm.rank
            diloco.step()
        diloco.finish()
        return torch.cat(weights).tolist(), torch.cat(diloco.anchor).tolist()

    assert run_ranks(program, 2) == [([steps / 2] * 7, [steps / 2] * 7)] * 2


def test_end_of_training_leaves_the_outer_momentum_out() -> None:
    def program(comm: un.Communicator) -> float:
        weight = torch.zeros(1, dtype=torch.float64)
        diloco = DiLoCo([weight], comm, every=100)
        weight += comm.rank
        diloco.outer_step()
        before = weight.item()
        weight += comm.rank
        diloco.finish()
        return weight.item() - before

    assert run_ranks(program, 2) == pytest.approx([0.5, 0.5], abs=1e-12)


def test_closed_averagers_send_nothing() -> None:
    def program(comm: un.Communicator) -> float:
        weight = torch.full((2,), float(comm.rank))
        averager = PeriodicAverager([weight], comm, 1, overlap_steps=1)
        averager.step()
        averager.close()
        averager.close()
        averager.finish()
        with pytest.raises(ClosedError):
            averager.step()
        comm.barrier()
        return weight[0].item()

    # What was under way has arrived.
    assert run_ranks(program, 2) == [0.5, 0.5]


@pytest.mark.parametrize("codec", [None, "int4"])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_state_resumes_with_exchanges_under_way(codec: str | None, alpha: float | None) -> None:
    def program(comm: un.Communicator) -> float:
        compression = None if codec is None else un.compression.error_feedback(codec)

        def made() -> tuple[list[torch.Tensor], torch.optim.Optimizer, PeriodicAverager]:
            parts = [p.requires_grad_() for p in torch.from_numpy(start()).split(WIDTHS)]
            named = list(zip(NAMES, parts, strict=True))
            averager = DiLoCo(named, comm, 6, fragments=3, overlap_steps=3, alpha=alpha, compression=compression)
            return parts, torch.optim.SGD(parts, lr=RATE), averager

        whole, optimizer, averager = made()
        run(averager, whole, optimizer, comm.rank, 15)
        moved = [p.detach().clone() for p in whole]
        state = copy.deepcopy(averager.state_dict())
        assert any(under_way is not None for under_way in state["under_way"])
        parts, second, resumed = made()
        with torch.no_grad():
            for part, there in zip(parts, moved, strict=True):
                part.copy_(there)
        resumed.load_state_dict(state)
        run(averager, whole, optimizer, comm.rank, 14)
        run(resumed, parts, second, comm.rank, 14)
        return max(float((a - b).detach().abs().max()) for a, b in zip(parts, whole, strict=True))

    assert run_ranks(program, 3) == [0.0] * 3


def test_state_resumes_on_another_number_of_ranks(tmp_path: Any) -> None:
    """Three ranks stop between two intervals, and two go on from their anchor and their momentum."""

    def made(comm: un.Communicator) -> tuple[list[torch.Tensor], torch.optim.Optimizer, PeriodicAverager]:
        parts = [p.requires_grad_() for p in torch.from_numpy(start()).split(WIDTHS)]
        named = list(zip(NAMES, parts, strict=True))
        averager = DiLoCo(named, comm, 6, fragments=[NAMES], overlap_steps=2, alpha=0.0)
        return parts, torch.optim.SGD(parts, lr=RATE), averager

    def before(comm: un.Communicator) -> None:
        parts, optimizer, averager = made(comm)
        run(averager, parts, optimizer, comm.rank, 12)
        state = {"parts": un.checkpoint.PerRank(parts), "averager": un.checkpoint.PerRank(averager)}
        un.checkpoint.save(tmp_path / "state", state, comm)

    def after(comm: un.Communicator) -> Array:
        parts, optimizer, averager = made(comm)
        state = {"parts": un.checkpoint.PerRank(parts), "averager": un.checkpoint.PerRank(averager)}
        un.checkpoint.load(tmp_path / "state", state, comm)
        assert averager.steps == 12
        run(averager, parts, optimizer, comm.rank, 8)
        return np.concatenate([p.detach().numpy() for p in parts])

    run_ranks(before, 3)
    found = run_ranks(after, 2)
    anchor, velocity = start(), np.zeros(sum(WIDTHS))
    here = [start() for _ in range(3)]
    change = np.zeros(sum(WIDTHS))
    for begin in (0, 6, 12):
        # The result of an exchange arrives two steps later, and replaces what ranks have learnt meanwhile.
        if begin:
            velocity = 0.9 * velocity + change
            anchor = anchor - 0.7 * (change + 0.9 * velocity)
            here = [anchor.copy() for _ in here]
        if begin == 12:
            # Of the ranks that there are now.
            here = here[:2]
        steps = 6 if not begin else 4
        here = [Quadratic(rank).after(x, steps) for rank, x in enumerate(here)]
        change = anchor - np.mean(here, axis=0)
    velocity = 0.9 * velocity + change
    anchor = anchor - 0.7 * (change + 0.9 * velocity)
    assert largest(found, [anchor] * 2) < 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_codecs_and_exchanges_under_way_resume_on_another_number_of_ranks(size: int, tmp_path: Any) -> None:
    def drifting(comm: un.Communicator, path: Any, steps: int, *, load: bool) -> list[Any]:
        weights = [torch.zeros(50), torch.zeros(30)]
        compression = un.compression.error_feedback("int4")
        averager = DiLoCo(weights, comm, 4, fragments=2, overlap_steps=2, compression=compression)
        state = {"weights": un.checkpoint.PerRank(weights), "averager": un.checkpoint.PerRank(averager)}
        if load:
            un.checkpoint.load(path, state, comm)
        owed = [codecs[0]["residual"] for codecs in averager.state_dict()["codecs"]]
        for _ in range(steps):
            for weight in weights:
                weight += torch.linspace(0, 1 + comm.rank, weight.numel())
            averager.step()
        under_way = [exchange is not None for exchange in averager.state_dict()["under_way"]]
        if not load:
            owed = [codecs[0]["residual"] for codecs in averager.state_dict()["codecs"]]
            un.checkpoint.save(path, state, comm)
        averager.outer_step()
        return [owed, under_way, torch.cat(weights)]

    saved = run_ranks(lambda comm: drifting(comm, tmp_path / "state", 11, load=False), 3)
    assert [under_way for _, under_way, _ in saved] == [[False, True]] * 3
    loaded = run_ranks(lambda comm: drifting(comm, tmp_path / "state", 9, load=True), size)
    for rank, (owed, _, weights) in enumerate(loaded):
        assert torch.equal(weights, loaded[0][2])
        for here, there in zip(owed, saved[rank][0] if rank < 3 else [None, None], strict=True):
            assert here is there is None or torch.equal(here, there)


def test_what_a_codec_owes_is_loaded_by_its_own_rank_only() -> None:
    def program(comm: un.Communicator) -> list[bool]:
        compression = un.compression.error_feedback("int4")
        first, second = (DiLoCo([torch.zeros(40)], comm, 1, compression=compression) for _ in range(2))
        first.tensors[0].copy_(torch.linspace(0, 1 + comm.rank, 40))
        first.step()
        kept = []
        for state in (first.state_dict(), {**first.state_dict(), "rank": comm.rank + 1}):
            second.load_state_dict(state)
            residual = second.state_dict()["codecs"][0][0]["residual"]
            kept.append(residual is not None and bool(residual.any()))
            second = DiLoCo([torch.zeros(40)], comm, 1, compression=compression)
        return kept

    assert run_ranks(program, 2) == [[True, False]] * 2


def test_a_state_of_other_fragments_is_rejected() -> None:
    def program(comm: un.Communicator) -> None:
        named = [("a", torch.zeros(2)), ("b", torch.zeros(2))]
        one, two = DiLoCo(named, comm, 4), DiLoCo(named, comm, 4, fragments=2)
        with pytest.raises(ValueError, match=r"of fragments \[\['a', 'b'\]\], not \[\['a'\], \['b'\]\]"):
            two.load_state_dict(one.state_dict())

    run_ranks(program, 1)


@pytest.mark.parametrize(
    "codec", ["int4", pytest.param("int8", marks=pytest.mark.soak), un.compression.topk(ratio=0.25), "onebit"]
)
def test_compressed_diloco_converges_to_the_minimum(codec: Any) -> None:
    """Where ranks have one minimum, what is lost shrinks with the changes, and nothing is lost for good."""

    def program(comm: un.Communicator) -> Array:
        parameters = [part.requires_grad_() for part in torch.from_numpy(start()).split(WIDTHS)]
        compression = un.compression.error_feedback(codec)
        averager = DiLoCo(parameters, comm, 6, 0.4, 0.5, True, fragments=3, overlap_steps=2, compression=compression)
        run(averager, parameters, torch.optim.SGD(parameters, lr=RATE), 0, 360)
        return np.concatenate([p.detach().numpy() for p in parameters])

    assert largest(run_ranks(program, 2), [Quadratic(0).c] * 2) < 1e-4


def test_four_bits_stay_near_the_uncompressed_fixed_point() -> None:
    def make(named: Any, comm: un.Communicator, _: object) -> PeriodicAverager:
        return DiLoCo(named, comm, 6, 0.4, 0.5, compression=un.compression.error_feedback("int4"))

    plain = streaming(2, 300, 6, rate=0.4, momentum=0.5)
    assert np.abs(plain[0] - start()).max() > 0.9
    assert largest(run_ranks(lambda comm: train(comm, make, 300), 2), plain) < 0.05


def test_fragments_by_bytes_and_by_name() -> None:
    def program(comm: un.Communicator) -> list[list[str]]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        by_bytes = PeriodicAverager(model, comm, 3, fragments=3)
        by_name = PeriodicAverager(model, comm, 3, fragments=[["0", "2"], ["1.weight", "1.bias"]])
        return by_bytes.state_dict()["fragments"] + by_name.state_dict()["fragments"]

    layers = [[f"{i}.weight", f"{i}.bias"] for i in range(3)]
    assert run_ranks(program, 2) == [[*layers, layers[0] + layers[2], layers[1]]] * 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"overlap_steps": -1}, ValueError, "overlap_steps must be at least 0 steps"),
        ({"overlap_steps": 1.5}, TypeError, "overlap_steps must be a number of steps, not float"),
        ({"alpha": 1.0}, ValueError, "alpha must be None or from 0 to less than 1"),
        ({"fragments": 0}, ValueError, "fragments must be at least 1 fragment, not 0"),
        ({"fragments": True}, TypeError, "fragments must be a number of fragments, not bool"),
        ({"fragments": [["first"]]}, ValueError, "'second' is in no fragment, and 1 more"),
        ({"fragments": [["first"], ["firs"]]}, ValueError, "fragment 1 names 'firs', which no"),
        ({"fragments": [["first", "second"], ["second"]]}, ValueError, "'second' is in fragments 0 and 1"),
        ({"fragments": 2, "every": lambda step: step == 7}, ValueError, "several fragments need a number of steps"),
        ({"reduce": "mode"}, ValueError, "unknown reduction 'mode'; known: clipped_mean, mean, median, trimmed_mean"),
        ({"reduce": 3}, TypeError, "reduce must be a name or a function, not int"),
        (
            {"reduce": "median", "outer": OuterUpdate(torch.optim.Adam, compression="int4")},
            ValueError,
            "compression= needs reduce='mean'",
        ),
    ],
)
def test_bad_arguments_send_nothing(options: dict[str, Any], error: type[Exception], said: str) -> None:
    def program(comm: un.Communicator) -> None:
        named = [(name, torch.zeros(2)) for name in NAMES]
        with pytest.raises(error, match=said):
            PeriodicAverager(named, comm, **options)
        comm.barrier()

    run_ranks(program, 2)


def test_anchors_hold_real_numbers() -> None:
    with pytest.raises(ValueError, match=r"anchor_dtype must be a dtype of real numbers, not torch.int32"):
        OuterUpdate(torch.optim.Adam, anchor_dtype=torch.int32)


def test_different_arguments_are_named() -> None:
    def program(comm: un.Communicator) -> None:
        for name, values in {
            "overlap_steps": (1, 2),
            "alpha": (0.5, None),
            "compression": ("int8", "int4"),
            "fragments": (1, [["parameter 0"]]),
            "reduce": ("mean", "median"),
            "anchor_dtype": (None, torch.float64),
        }.items():
            with pytest.raises(MismatchError, match=rf"settings of DiLoCo', at \['{name}'\]"):
                DiLoCo([torch.zeros(1)], comm, **{name: values[comm.rank]})  # type: ignore[arg-type]

    run_ranks(program, 2)


class ByteCounter(Wrapper):
    """Counts the bytes that this rank sends; algorithms are chosen as if nothing else had a cost."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sent = 0
        self.latency_s = 0.0
        self.second_per_byte = 1.0
        self.parts: list[ByteCounter] = []

    def wrap_child(self, inner: Transport) -> ByteCounter:
        self.parts.append(ByteCounter(inner))
        return self.parts[-1]

    def post(self, batch: Sequence[Message]) -> Work:
        self.sent += sum(message.tensor.nbytes for message in batch if isinstance(message, Send))
        return super().post(batch)

    def total(self) -> int:
        """Return the bytes sent, also by communicators that were made of this one."""
        return self.sent + sum(part.total() for part in self.parts)


def test_bytes_per_step_are_the_formulas() -> None:
    """A transformer of a million parameters in four bits, 100 steps apart, and gradients averaged at each step."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(2000, 128), torch.nn.TransformerEncoder(layer, 5))
    numel = sum(p.numel() for p in model.parameters())
    assert 1.2e6 < numel < 1.3e6
    counters: list[ByteCounter] = []

    def counted(inner: Transport) -> Transport:
        counters.append(ByteCounter(inner))
        return counters[-1]

    def program(comm: un.Communicator) -> tuple[float, float, float]:
        own = copy.deepcopy(model)
        counter = next(counter for counter in counters if counter.rank == comm.rank)
        compression = un.compression.error_feedback("int4")
        averager = DiLoCo(own, comm, 100, fragments=4, overlap_steps=5, alpha=0.5, compression=compression)
        named = dict(own.named_parameters())
        formula = 0.0
        for names in averager.state_dict()["fragments"]:
            shapes = [named[name].shape for name in names]
            elements = sum(shape.numel() for shape in shapes)
            formula += compression.wire_bytes(elements, shapes, comm.size, 4)
        sent = []
        for _ in range(2):
            before = counter.total()
            for _ in range(100):
                averager.step()
            # It waits for the last exchange.
            averager.state_dict()
            sent.append(counter.total() - before)
        for parameter in own.parameters():
            parameter.grad = torch.zeros_like(parameter)
        un.average_gradients(own, comm)
        before = counter.total()
        un.average_gradients(own, comm)
        return sent[1] / 100, formula / 100, float(counter.total() - before)

    for streaming_bytes, formula, ddp in run_ranks(program, 2, wrap=counted):
        assert streaming_bytes == formula
        # Four bits a number, and a float32 for each 256, both ways, for half of the numbers.
        assert streaming_bytes == pytest.approx(numel * (4 + 32 / 256) / 8 / 100, rel=1e-3)
        assert ddp == pytest.approx(numel * 4, rel=1e-3)
        assert ddp > 770 * streaming_bytes


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_with_processes(backend: str) -> None:
    def program(comm: un.Communicator) -> Array:
        def make(named: Any, comm: un.Communicator, _: object) -> PeriodicAverager:
            return DiLoCo(named, comm, 6, fragments=[[n] for n in NAMES], overlap_steps=4, alpha=0.5)

        return train(comm, make, 29)

    found = un.testing.pool(backend).run(program, size=2)
    assert largest(found, streaming(2, 29, 6, 4, 0.5, [0, 2, 4])) < 1e-12
