"""Interleaved timing: order, rounds, paired ratios, and ranks of other checkouts."""

from __future__ import annotations

import gc
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import unisono as un
from unisono.tools.bench import Spread, Timings, clock, interleave, timed


def taken(names: str, rounds: int) -> list[str]:
    """The order in which samples are taken, round by round."""
    order: list[str] = []

    def sample(name: str) -> float:
        order.append(name)
        return 1.0

    # A default in a lambda has no type.
    samples = {name: lambda name=name: sample(name) for name in names}  # type: ignore[misc]
    timings = interleave(samples, rounds=rounds, warmup=0)
    assert timings.rounds == rounds
    return ["".join(order[at : at + len(names)]) for at in range(0, len(order), len(names))]


def test_two_candidates_run_in_abba_order() -> None:
    assert taken("AB", 4) == ["AB", "BA", "BA", "AB"]


def test_three_candidates_run_in_every_order_equally_often() -> None:
    assert Counter(Counter(taken("ABC", 12)).values()) == {2: 6}


def test_ratios_are_within_one_round() -> None:
    # Candidate B takes twice as long in each round, however much the machine slows down.
    figures = {"A": [1.0, 10.0, 3.0], "B": [2.0, 20.0, 6.0]}
    timings = Timings(figures)
    assert timings.ratio("B", "A") == Spread(2.0, 2.0, 2.0)
    assert timings.difference("B", "A").median == 3.0


def test_warmup_does_not_count_and_rounds_follow_from_seconds() -> None:
    numbers = iter(range(1000))
    after: list[None] = []
    timings = interleave(
        {"A": lambda: float(next(numbers))}, seconds=0, least=3, warmup=2, after_round=lambda: after.append(None)
    )
    assert timings.figures == {"A": [2.0, 3.0, 4.0]}
    assert len(after) == 5
    assert interleave({"A": lambda: 1.0}, seconds=60, most=20).rounds == 20


def test_no_garbage_is_collected_while_samples_are_taken() -> None:
    seen = interleave({"A": lambda: float(gc.isenabled())}, rounds=2)
    assert seen.figures == {"A": [0.0, 0.0]}
    assert gc.isenabled()


def test_samples_are_prepared_and_verified_outside_the_timer() -> None:
    steps: list[str] = []
    sample = timed(
        lambda: steps.append("call"),
        count=2,
        before=lambda: steps.append("before"),
        after=lambda: steps.append("after"),
    )
    assert sample() < 1
    assert steps == ["before", "call", "call", "after"]


def test_time_is_the_slowest_of_all_ranks() -> None:
    def program(comm: un.Communicator) -> tuple[int, Spread]:
        clock([lambda: None], comm)
        timings = interleave({"A": lambda: float(comm.rank)}, comm, seconds=0, least=3 + comm.rank)
        return timings.rounds, timings.slowest(comm).of("A")

    assert un.launch(program, 2, "thread") == [(3, Spread(1.0, 1.0, 1.0))] * 2


@pytest.fixture
def checkouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of `benchmarks/` that runs other checkouts."""
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "benchmarks")
    return import_module("_checkouts")


@pytest.mark.soak
def test_checkouts_alternate(checkouts: ModuleType) -> None:
    source = Path(un.__file__).parents[1]
    cases = [
        checkouts.Collective(8, "int64", tensors=3, calls=2),
        checkouts.Collective(4096, "bfloat16", registered=True, tensors=2),
        *(checkouts.Collective(64, tensors=2, calls=2, name=name) for name in ("gather", "message", "barrier")),
    ]
    with checkouts.Checkout(source, 2) as one, checkouts.Checkout(source, 2) as other:
        for case in cases:
            timings = interleave({"one": one.sample(case), "other": other.sample(case)}, rounds=3, warmup=1)
            assert timings.ratio("one", "other").low > 0


@pytest.mark.soak
def test_checkout_without_ranks(checkouts: ModuleType) -> None:
    with checkouts.Checkout(Path(un.__file__).parents[1], 1, "") as one:
        assert all(one.sample(checkouts.Repeated(program, 1))() > 0 for program in ("launch", "pool_submit"))


def test_checkout_reports_why_it_cannot_run(tmp_path: Path, checkouts: ModuleType) -> None:
    with pytest.raises(ValueError, match="there is no unisono in"):
        checkouts.Checkout(tmp_path, 2)
    (tmp_path / "unisono").mkdir()
    # The ranks import torch first, from here, which takes no time.
    (tmp_path / "torch.py").touch()
    (tmp_path / "unisono" / "__init__.py").write_text("raise ImportError('broken')")
    with pytest.raises(RuntimeError, match="did not start"):
        checkouts.Checkout(tmp_path, 2)
