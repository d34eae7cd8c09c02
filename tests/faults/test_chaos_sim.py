"""A small training under random faults: correct weights, or an error that names a rank; reproducible."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import plain_of

import unisono as un
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.elastic.recovery import Recovery
from unisono.errors import CommError
from unisono.testing import KilledError, RankFaults, chaos
from unisono.wrappers.base import Wrapper

RANKS, STEPS = 3, 5


def training(comm: un.Communicator, hooks: bool) -> torch.Tensor:
    """The weights after a few steps of SGD on a network of two layers, in float64."""
    draw = torch.Generator().manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) + comm.rank)
    un.broadcast_parameters(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Buckets so small that there are several.
    averager = un.GradientAverager(model, comm, bucket_cap_mb=1e-4) if hooks else None
    samples = torch.randn(STEPS, 2 * RANKS, 4, generator=draw, dtype=torch.float64)
    for batch in samples:
        mine = batch[comm.rank :: comm.size]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True)).backward()
        if averager is None:
            un.average_gradients(model, comm)
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("hooks", [pytest.param(False, marks=pytest.mark.soak), True])
def test_training_is_correct_or_names_the_failure(hooks: bool) -> None:
    # Each kind of fault that a seed draws, except for lost messages, which survivors meet below.
    endings = chaos.check(training, RANKS, hooks, seeds=[1, 4, 6, 8, 9])
    assert endings.total() == 5
    assert endings["right"] >= (2 if hooks else 1)


@pytest.mark.soak
def test_thousand_seeds() -> None:
    started = time.monotonic()
    endings: Counter[str] = Counter()
    for hooks, first in ((False, 1000), (True, 2000)):
        endings += chaos.check(training, RANKS, hooks, seeds=range(first, first + 500))
    hours = (time.monotonic() - started) / 3600
    print(f"\n1000 seeds, each twice: {2000 / hours:.0f} runs an hour; {dict(endings.most_common())}")
    assert endings.total() == 1000
    assert endings["right"] >= 300
    # All kinds of trouble have been met.
    met = " ".join(endings)
    assert all(kind in met for kind in ("CorruptedError", "KilledError", "PeerLostError", "DeadlockError"))


def test_weights_equal_those_of_one_rank() -> None:
    """The expected weights are correct."""
    apart, alone = un.simulate(training, RANKS, (False,)).results[0], un.simulate(training, 1, (False,)).results[0]
    assert (apart - alone).abs().max() < 1e-10
    assert torch.equal(apart, un.launch(training, RANKS, "thread", (False,))[0])


def test_seed_is_reproducible() -> None:
    runs = [chaos.run(training, RANKS, 10, False) for _ in range(2)]
    assert runs[0].trace == runs[1].trace
    assert (runs[0].ending, runs[0].time_s, runs[0].weather) == (runs[1].ending, runs[1].time_s, runs[1].weather)


@pytest.mark.soak
def test_seed_is_reproducible_in_another_process() -> None:
    """The other process shares nothing, and has other string hashes."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    code = "import test_chaos_sim as t; print(*(t.chaos.run(t.training, 3, s, True).digest for s in range(12)))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": number, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        ).stdout
        for number in ("1", "2")
    }
    assert len(digests) == 1


# -- deaths, after which training goes on ----------------------------------------------------------
def recovering(comm: un.Communicator, hooks: bool) -> torch.Tensor:
    """Each step trains on its whole batch, divided between survivors, so the weights do not depend on deaths."""
    draw = torch.Generator().manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if hooks:
        parts["averager"] = un.GradientAverager(model, comm, bucket_cap_mb=1e-4)
    going = Recovery(comm, **parts)
    samples, failures = torch.randn(STEPS, 12, 4, generator=draw, dtype=torch.float64), 0
    while going.step < STEPS:
        try:
            mine = samples[going.step][going.comm.rank :: going.comm.size]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True)).backward()
            if not hooks:
                un.average_gradients(model, going.comm)
            optimizer.step()
            going.commit(len(mine))
        except CommError:
            failures += 1
            if failures > 20:
                raise
            going.recover()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def nearly(outcomes: Sequence[Any], calm: Sequence[Any]) -> str | None:
    """A judge: as `named_or_right`, but that another number of ranks adds in another order."""
    rounded = [
        wanted if isinstance(found, torch.Tensor) and (found - wanted).abs().max() < 1e-10 else found
        for found, wanted in zip(outcomes, calm, strict=True)
    ]
    return chaos.named_or_right(rounded, calm)


@pytest.mark.parametrize("hooks", [pytest.param(False, marks=pytest.mark.soak), True])
def test_survivors_continue_training(hooks: bool) -> None:
    # In 1 and 2 ranks are frozen and killed, and messages get lost; in 3109 a rank is preempted while it aborts a
    # message on its way.
    endings = chaos.check(recovering, 4, hooks, seeds=[1, 2, 3109], judge=nearly)
    assert endings.total() == 3
    # A rank was killed, and all others came to the right weights.
    run = un.simulate(
        recovering,
        4,
        (hooks,),
        faults={"on_ranks": RankFaults(kill_at=5, ranks=[2])},
        on_failure="continue",
        timeout=10,
    )
    calm = un.simulate(recovering, 4, (hooks,)).results
    assert [type(end) for end in run.results] == [torch.Tensor, torch.Tensor, KilledError, torch.Tensor]
    assert nearly(run.results, calm) is None


@pytest.mark.soak
@pytest.mark.parametrize("hooks", [False, True])
def test_survivors_continue_training_repeatedly(hooks: bool) -> None:
    endings = chaos.check(recovering, 4, hooks, seeds=range(3000, 3250), judge=nearly)
    print(f"\n{dict(endings.most_common())}")
    assert endings["right"] >= 125
    assert endings["KilledError"] >= 10, "no run in which a rank died and all others went on"


# -- that chaos notices ----------------------------------------------------------------------------
class Spoiling(Wrapper):
    """Adds to what it sends now and then, and says nothing."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._count = 0

    def wrap_child(self, inner: Transport) -> Spoiling:
        return Spoiling(inner)

    def post(self, batch: list[Message]) -> Work:  # type: ignore[override]  # narrower, for this test
        self._count += 1
        if self._count == 4:
            for message in batch:
                if isinstance(message, Send) and message.tensor.is_floating_point():
                    message.tensor.add_(1.0)
        return self.inner.post(batch)


def test_wrong_result_is_detected() -> None:
    calm = un.simulate(training, RANKS, (False,)).results
    spoilt = un.simulate(training, RANKS, (False,), wrap=Spoiling).results
    assert chaos.named_or_right(calm, calm) is None
    assert "rank 0 has tensor" in (chaos.named_or_right(spoilt, calm) or "")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (KeyError("x"), "rank 0 ended by KeyError"),
        (CommError("something"), "has no rank or operation"),
        (None, "rank 0 has None, not 1"),
        (CommError("x", rank=0, operation="send"), None),
        (1, None),
    ],
)
def test_verdict_of_outcomes(outcome: Any, said: str | None) -> None:
    found = chaos.named_or_right([outcome], [1])
    assert found is None if said is None else said in (found or "")


def test_failure_reports_seed_and_fault_plan() -> None:
    with pytest.raises(chaos.ChaosError, match=r"seed 3: rank 0 ended by KeyError(.|\n)*FaultPlan\(network=SimNetwork"):
        chaos.check(_raises_in_bad_weather, 2, seeds=[3])


def _raises_in_bad_weather(comm: un.Communicator) -> int:
    # Without faults, the transport has no wrapper but that of the communicator itself.
    if isinstance(plain_of(comm), Wrapper):
        raise KeyError("mine")
    return 1


def test_nondeterminism_is_detected() -> None:
    calls: list[int] = []

    def program(comm: un.Communicator) -> None:
        calls.append(comm.rank)
        for _ in range(len(calls) // 20):
            comm.barrier()

    with pytest.raises(chaos.ChaosError, match="does not run the same way twice"):
        chaos.check(program, 2, seeds=range(100, 140))


def test_fault_plans_differ() -> None:
    drawn = [chaos.weather(seed, 3) for seed in range(200)]
    on_ranks = [one.faults["on_ranks"] for one in drawn if "on_ranks" in one.faults]
    kinds = {name for one in drawn for name in one.faults}
    kinds |= {name for one in on_ranks for name, value in dataclasses.asdict(one).items() if value is not None}
    assert kinds >= {"drop", "delay", "duplicate", "reorder", "corrupt", "kill_at", "freeze_at", "slow_bytes_per_s"}
    assert any(not one.faults for one in drawn)
    assert any(one.network.links for one in drawn)
