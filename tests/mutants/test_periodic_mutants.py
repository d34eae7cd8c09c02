"""Wrong ways to communicate less often, to notice divergence and to share statistics; a unit test kills each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from assertions import assertion_of
from hypothesis import Phase, settings
from loading import load

from unisono.comm import equal_tensors
from unisono.communicator import Communicator
from unisono.core import threads
from unisono.core.types import Message, Send
from unisono.errors import CommError
from unisono.gradients import (
    anchor,
    exchanges,
    gossip,
    local_sgd,
    periodic,
    periodic_averager,
    sync_batch_norm,
    topology,
)
from unisono.utils import flatten

UNIT = Path(__file__).parents[1] / "unit" / "gradients"
Patch = pytest.MonkeyPatch


@cache
def unit(name: str) -> ModuleType:
    """The unit tests, by the end of their file's name."""
    return load(UNIT / f"test_{name}.py")


def averages(buffers: bool = False) -> None:
    unit("local_sgd").test_floating_point_state_is_averaged(2, buffers)


def sums(patch: Patch) -> None:
    right = Communicator.all_reduce
    patch.setattr(Communicator, "all_reduce", lambda comm, tensor, op="sum", **how: right(comm, tensor, "sum", **how))
    averages()


def weighs_by_dtype(patch: Patch) -> None:
    """Leaves out what is not float32."""
    right = periodic_averager.floating
    patch.setattr(periodic_averager, "floating", lambda named: [n for n in right(named) if n[1].dtype == torch.float32])
    averages()


def forgets_buffers(patch: Patch) -> None:
    right = periodic.named_tensors
    for module in (periodic, periodic_averager):
        patch.setattr(module, "named_tensors", lambda model, **_: right(model))
    averages(buffers=True)


def a_step_too_soon(patch: Patch) -> None:
    patch.setattr(periodic.PeriodicSchedule, "__call__", lambda self, step: (step + 1) % self.n == 0)
    unit("local_sgd").test_equals_manual_averaging(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), 3)


def uses_the_callers_line(patch: Patch) -> None:
    patch.setattr(Communicator, "dup", lambda comm: comm)
    unit("local_sgd").test_messages_are_separate_from_the_callers()


def formula(nesterov: bool = True) -> None:
    unit("local_sgd_diloco").test_matches_the_published_algorithm(2, 0.7, 0.9, nesterov)


def goes_the_wrong_way(patch: Patch) -> None:
    right = flatten.flat_apply

    def wrong(bucket: list[torch.Tensor], action: Callable[[torch.Tensor], object], **how: bool) -> None:
        right(bucket, action, **how)
        for change in bucket:
            change.neg_()

    patch.setattr(exchanges, "flat_apply", wrong)
    formula()


def steps_apart(patch: Patch) -> None:
    """Each rank takes its own change for the mean one."""
    patch.setattr(exchanges, "flat_apply", lambda bucket, action, **how: None)
    formula()


def forgets_its_momentum(patch: Patch) -> None:
    right = local_sgd.DiLoCo.step

    def step(self: Any) -> Any:
        self.outer.state.clear()
        return right(self)

    patch.setattr(local_sgd.DiLoCo, "step", step)
    formula()


def keeps_its_first_anchor(patch: Patch) -> None:
    right = local_sgd.DiLoCo.step

    def step(self: Any) -> Any:
        before = [there.clone() for there in self.anchor]
        acted = right(self)
        for there, old in zip(self.anchor, before, strict=True):
            there.copy_(old)
        return acted

    patch.setattr(local_sgd.DiLoCo, "step", step)
    formula()


def loads_no_anchor(patch: Patch) -> None:
    right = local_sgd.DiLoCo.load_state_dict

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        here = zip((name for name, _ in self.named), self.anchor, strict=True)
        right(self, {**state, "anchor": {name: there.clone() for name, there in here}})

    patch.setattr(local_sgd.DiLoCo, "load_state_dict", load_state_dict)
    unit("local_sgd_diloco").test_state_dict_resumes()


def streams(interval: int = 6, lag: int = 3, alpha: float | None = 0.5) -> None:
    unit("periodic_averager").test_streaming_diloco_is_the_papers(2, interval, lag, alpha)


def applies_too_soon(patch: Patch) -> None:
    right = exchanges.StepExchanges._exchange
    patch.setattr(
        exchanges.StepExchanges,
        "_exchange",
        lambda self, fragment, step, lag, alpha, *rest, **how: right(self, fragment, step, 0, alpha, *rest, **how),
    )
    streams()


def mixes_the_other_way(patch: Patch) -> None:
    right = torch.lerp
    patch.setattr(torch, "lerp", lambda start, end, weight: right(end, start, weight))
    streams(alpha=0.25)


def sends_all_fragments_together(patch: Patch) -> None:
    patch.setattr(periodic_averager, "replace", lambda schedule, **_: schedule)
    streams()


def forgets_what_was_learnt_meanwhile(patch: Patch) -> None:
    right = exchanges.Exchanges.apply

    def apply(self: Any, fragment: Any, tensors: Any) -> bool:
        if fragment.exchange is not None:
            fragment.exchange.ahead = None
        return right(self, fragment, tensors)

    patch.setattr(exchanges.Exchanges, "apply", apply)
    streams(alpha=None)


def stays_where_it_is(patch: Patch) -> None:
    """Does not look ahead while an exchange is under way."""
    patch.setattr(anchor.Anchor, "look_ahead", lambda self, _, here, __: [p.clone() for p in here])
    streams(alpha=None)


def blocks_in_step(patch: Patch) -> None:
    """Carries out exchanges in the caller's thread."""
    right = Communicator.all_reduce
    patch.setattr(Communicator, "all_reduce", lambda comm, tensor, op: right(comm, tensor, op, timeout=0.5))
    patch.setattr(threads.SerialWorker, "run", lambda self, task: task())
    unit("periodic_averager").test_training_goes_on_while_an_exchange_is_under_way()


def anchors_in_the_parameters_dtype(patch: Patch) -> None:
    patch.setattr(anchor, "_wide", lambda tensor, dtype: tensor.detach().clone())
    unit("periodic_averager").test_a_hundred_small_outer_steps_are_kept_in_bfloat16()


def loads_what_another_rank_is_owed(patch: Patch) -> None:
    right = local_sgd.DiLoCo.load_state_dict
    patch.setattr(
        local_sgd.DiLoCo, "load_state_dict", lambda self, state: right(self, {**state, "rank": self._comm.rank})
    )
    unit("periodic_averager").test_what_a_codec_owes_is_loaded_by_its_own_rank_only()


def counts_its_own_neighbours_only(patch: Patch) -> None:
    """Rows add up to one, columns do not: the mean drifts."""

    def wrong(neighbours: topology.Neighbours, size: int) -> list[dict[int, float]]:
        return [dict.fromkeys(sorted([rank, *taken]), 1 / (1 + len(taken))) for rank, taken in enumerate(neighbours)]

    patch.setattr(gossip, "mixing", wrong)
    unit("gossip").test_mean_is_kept_and_reached("grid", 5)


def sends_something_else(patch: Patch) -> None:
    right = Communicator.batch_isend_irecv

    def post(self: Communicator, batch: list[Message]) -> Any:
        for message in batch:
            # Not the two numbers that neighbours compare before.
            if self.rank == 0 and isinstance(message, Send) and message.tensor.numel() > 2:
                message.tensor.mul_(1.01)
        return right(self, batch)

    patch.setattr(Communicator, "batch_isend_irecv", post)
    unit("gossip").test_round_applies_the_mixing_matrix("grid", 3)


def stays_at_one_distance(patch: Patch) -> None:
    right = topology.exponential
    patch.setitem(topology.TOPOLOGIES, "exponential", lambda size, turn: right(size, 0))
    unit("gossip").test_mean_is_kept_and_reached("exponential", 8)


def forgets_the_round(patch: Patch) -> None:
    right = gossip.Gossip.load_state_dict
    patch.setattr(gossip.Gossip, "load_state_dict", lambda self, state: right(self, {**state, "rounds": [0]}))
    unit("gossip").test_converges_to_the_mean_and_resumes()


def waits_for_all(patch: Patch) -> None:
    right = Communicator.batch_isend_irecv

    def post(self: Communicator, batch: list[Message]) -> Any:
        self.barrier(timeout=0.5)
        return right(self, batch)

    patch.setattr(Communicator, "batch_isend_irecv", post)
    unit("gossip").test_ranks_need_not_wait_for_all()


@cache
def pairs() -> Callable[[], None]:
    """A test of hashes, which need not look for the smallest failure."""
    return settings(phases=[Phase.generate])(unit("guards_divergence").test_hash_depends_on_positions_and_pairs)


def hashes_without_places(patch: Patch) -> None:
    patch.setattr(equal_tensors, "_keys", lambda: torch.tensor([3]).expand(1 << 16))
    pairs()()


def hashes_by_even_keys(patch: Patch) -> None:
    """Words of 64 bits times keys of 64: two signs that change cancel out."""
    patch.setattr(equal_tensors, "_keys", lambda: torch.arange(1, 1 << 17, 2) << 33)
    pairs()()


def hashes_chunks_alike(patch: Patch) -> None:
    patch.setattr(equal_tensors, "_odd", lambda source: 1)
    unit("guards_divergence").test_hash_of_long_tensors(65537)


def hashes_values(patch: Patch) -> None:
    """Numbers, not bits."""
    patch.setattr(
        unit("guards_divergence"),
        "tensor_hash",
        lambda t: (t.double() * torch.arange(1, t.numel() + 1)).sum().to(torch.int64),
    )
    unit("guards_divergence").test_equal_bits_are_equal_and_zeros_are_not()


def blames_the_others(patch: Patch) -> None:
    """Takes rank 0 for right."""

    def odd_ranks(hashes: list[int]) -> str | None:
        odd = [str(rank) for rank, value in enumerate(hashes) if value != hashes[0]]
        return f"ranks {', '.join(odd)} differ from rank 0" if odd else None

    patch.setattr(equal_tensors, "odd_ranks", odd_ranks)
    expected = "rank 0 differs from ranks 1, 2, 3 (by up to 1)"
    unit("guards_divergence").test_differing_ranks([2.0, 1.0, 1.0, 1.0], expected)


def statistics(counts: tuple[int, ...] = (4, 2)) -> None:
    unit("sync_batch_norm").test_equals_batch_norm_on_the_whole_batch(counts, (3, 2), {})


def weighs_ranks_alike(patch: Patch) -> None:
    """The mean of means, however many values each is of."""
    right = sync_batch_norm.batch_statistics

    def wrong(given: torch.Tensor, comm: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
        total, _, variance = right(given, comm)
        mean = given.mean([0, 2, 3])
        comm.all_reduce(mean, "avg")
        return total, mean, variance

    patch.setattr(sync_batch_norm, "batch_statistics", wrong)
    statistics()


def tracks_the_biased_variance(patch: Patch) -> None:
    right = sync_batch_norm.SyncBatchNorm._track
    patch.setattr(
        sync_batch_norm.SyncBatchNorm,
        "_track",
        lambda self, total, mean, variance: right(self, total, mean, variance * ((total - 1) / total)),
    )
    statistics()


class Quiet:
    """A communicator whose all_reduce does not."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass


def goes_backward_alone(patch: Patch) -> None:
    right = sync_batch_norm.Normalise.apply
    patch.setattr(sync_batch_norm.Normalise, "apply", lambda *given: right(*given[:-1], Quiet(given[-1])))
    statistics()


@pytest.mark.parametrize(
    "mutant",
    [
        sums,
        weighs_by_dtype,
        forgets_buffers,
        a_step_too_soon,
        goes_the_wrong_way,
        steps_apart,
        forgets_its_momentum,
        keeps_its_first_anchor,
        loads_no_anchor,
        applies_too_soon,
        mixes_the_other_way,
        sends_all_fragments_together,
        forgets_what_was_learnt_meanwhile,
        stays_where_it_is,
        anchors_in_the_parameters_dtype,
        loads_what_another_rank_is_owed,
        counts_its_own_neighbours_only,
        sends_something_else,
        stays_at_one_distance,
        forgets_the_round,
        hashes_without_places,
        hashes_by_even_keys,
        hashes_chunks_alike,
        hashes_values,
        blames_the_others,
        weighs_ranks_alike,
        tracks_the_biased_variance,
        goes_backward_alone,
    ],
)
def test_wrong_mutants_are_killed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with pytest.raises(AssertionError):
        mutant(monkeypatch)


@pytest.mark.parametrize("mutant", [uses_the_callers_line, waits_for_all, blocks_in_step])
def test_interfering_mutants_are_killed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with pytest.raises(CommError):
        mutant(monkeypatch)


def test_correct_implementations_survive() -> None:
    checks = (averages, lambda: averages(buffers=True), formula, statistics, streams)
    assert [assertion_of(check) for check in checks] == [""] * 5
