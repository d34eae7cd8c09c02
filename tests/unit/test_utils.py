"""Helpers for training scripts: seeds, norms of gradients, logging, throughput."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import get_total_norm

import unisono as un
from unisono.errors import MismatchError
from unisono.testing import run_ranks
from unisono.utils import clip_grad_norm_, grad_norm, rank_logger, seed
from unisono.utils.seeding import stream_seed


@contextmanager
def global_generators_restored() -> Iterator[None]:
    rng = un.checkpoint.RNG()
    state = rng.state_dict()
    yield
    rng.load_state_dict(state)


def draws(generators: un.utils.Generators) -> list[float]:
    return [
        random.random(),
        float(np.random.random()),
        torch.rand(1).item(),
        torch.rand(1, generator=generators.rank).item(),
        torch.rand(1, generator=generators.shared).item(),
    ]


def test_seed_gives_streams_that_repeat_and_differ() -> None:
    with global_generators_restored():
        first, again, other = (draws(seed(number)) for number in (7, 7, 8))
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == 5


def test_seed_on_ranks() -> None:
    def program(comm: un.Communicator) -> tuple[float, float]:
        generators = seed(7, comm)
        return torch.rand(1, generator=generators.rank).item(), torch.rand(1, generator=generators.shared).item()

    with global_generators_restored():
        own, shared = zip(*run_ranks(program, 4), strict=True)
        alone = seed(7)
        assert torch.rand(1, generator=alone.rank).item() == own[0]
    assert len(set(own)) == 4
    assert len(set(shared)) == 1


@pytest.mark.parametrize("number", [0, -1, 1 << 100])
def test_streams_differ_where_torch_looks(number: int) -> None:
    streams = [stream_seed(number, k) for k in range(10_000)]
    assert len({stream % (1 << 32) for stream in streams}) == len(streams)
    assert all(0 <= stream < 1 << 64 for stream in streams)
    # Each bit is set in about half of them.
    for bit in range(32):
        assert abs(sum(stream >> bit & 1 for stream in streams) - 5000) < 300


def test_wrong_seeds_are_errors_on_every_rank() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match="ranks differ in 'seed': rank 0: 0; rank 1: 1"):
            seed(comm.rank, comm)
        with pytest.raises(MismatchError, match="ranks differ in 'seed': rank 0: 1; rank 1: 'a float'"):
            seed(1.5 if comm.rank == 1 else 1, comm)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a whole number, not a float"):
            seed(1.5, comm)  # type: ignore[arg-type]

    run_ranks(program, 2)


def test_resumed_generators_go_on(tmp_path: Path) -> None:
    def save(comm: un.Communicator) -> tuple[float, float]:
        generators = seed(7, comm)
        torch.rand(3, generator=generators.shared)
        un.checkpoint.save(tmp_path, {"generators": generators}, comm)
        return torch.rand(1, generator=generators.rank).item(), torch.rand(1, generator=generators.shared).item()

    def load(comm: un.Communicator) -> tuple[float, float]:
        generators = seed(8, comm)
        un.checkpoint.load(tmp_path, {"generators": generators}, comm)
        return torch.rand(1, generator=generators.rank).item(), torch.rand(1, generator=generators.shared).item()

    with global_generators_restored():
        saved, loaded = run_ranks(save, 2), run_ranks(load, 3)
    assert loaded[:2] == saved
    # A further rank keeps its own, but shares what is shared.
    assert loaded[2][1] == saved[0][1]
    assert loaded[2][0] not in (saved[0][0], saved[1][0])

    def drift(comm: un.Communicator) -> None:
        generators = seed(7, comm)
        torch.rand(1 + comm.rank, generator=generators.shared)
        with pytest.raises(MismatchError, match=r"generators\.shared"):
            un.checkpoint.save(tmp_path, {"generators": generators}, comm)

    with global_generators_restored():
        run_ranks(drift, 2)


def test_global_generators_are_in_rng(tmp_path: Path) -> None:
    with global_generators_restored():
        generators = seed(3)
        un.checkpoint.save(tmp_path, {"rng": un.checkpoint.RNG(), "generators": generators})
        after = draws(generators)
        un.checkpoint.load(tmp_path, {"rng": un.checkpoint.RNG(), "generators": generators})
        assert draws(generators) == after


# -- gradients ---------------------------------------------------------------------------------
def with_grad(grad: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    return parameter


def grads(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=dtype, generator=source) for shape in ((3, 4), (7,), ())]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_norm_and_clipping_equal_those_of_torch(norm_type: float) -> None:
    ours, theirs = ([with_grad(g) for g in grads(torch.float32)] for _ in range(2))
    ours.append(torch.nn.Parameter(torch.zeros(1)))
    assert torch.equal(
        clip_grad_norm_((p for p in ours), 0.5, norm_type=norm_type),
        torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type),
    )
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=False))  # type: ignore[arg-type]
    assert torch.equal(grad_norm(ours[0]), get_total_norm([ours[0].grad]))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_norm_of_shards(norm_type: float) -> None:
    flat = torch.cat([g.flatten() for g in grads()])
    whole = with_grad(flat)
    norm = torch.nn.utils.clip_grad_norm_(whole, 0.5, norm_type)

    def program(comm: un.Communicator) -> tuple[float, float]:
        # The last rank has nothing.
        parts = [with_grad(part) for part in flat.tensor_split(comm.size - 1)[comm.rank : comm.rank + 1]]
        found = clip_grad_norm_(parts, 0.5, comm, norm_type)
        assert whole.grad is not None
        for part, expected in zip(parts, whole.grad.tensor_split(comm.size - 1)[comm.rank :], strict=False):
            torch.testing.assert_close(part.grad, expected, rtol=1e-14, atol=0)
        return found.item(), grad_norm(parts, comm, norm_type).item()

    for size in (2, 3, 4):
        results = run_ranks(program, size)
        assert len(set(results)) == 1
        assert results[0] == (pytest.approx(norm.item(), rel=1e-14), pytest.approx(0.5, rel=1e-5))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradients_are_seen_by_all_ranks(bad: float, norm_type: float) -> None:
    def program(comm: un.Communicator) -> None:
        part = with_grad(torch.tensor([1.0, bad if comm.rank == 1 else 2.0]))
        before = part.grad.clone()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match=f"the norm of the gradients is {bad}; gradients are unchanged"):
            clip_grad_norm_([part], 1.0, comm, norm_type, error_if_nonfinite=True)
        assert str(part.grad) == str(before)
        assert not clip_grad_norm_([part], 1.0, comm, norm_type).isfinite()

    run_ranks(program, 3)


def test_norm_type_must_be_positive() -> None:
    with pytest.raises(ValueError, match="norm_type must be positive, not 0"):
        grad_norm([], norm_type=0)
    assert grad_norm([]) == 0


# -- logging -----------------------------------------------------------------------------------
def test_rank_logger(caplog: pytest.LogCaptureFixture) -> None:
    def program(comm: un.Communicator) -> None:
        rank_logger("unisono.test_utils", comm, ranks=[1]).info("100 %% of %s", "it")
        rank_logger(logging.getLogger("unisono.test_utils"), comm).info("at %d", comm.rank, extra={"step": 3})
        with pytest.raises(ValueError, match="2 is not a rank: these are 0 to 1"):
            rank_logger("unisono.test_utils", comm, ranks=[2])

    with caplog.at_level(logging.INFO, "unisono.test_utils"):
        run_ranks(program, 2)
    format_of = logging.Formatter("%(rank)d %(size)d %(step)s %(message)s").format
    texts = sorted(map(format_of, caplog.records))
    assert texts == ["0 2 3 [rank 0 of 2] at 0", "1 2 3 [rank 1 of 2] at 1", "1 2 None 100 % of it"]
    assert all(record.filename == "test_utils.py" for record in caplog.records)


# -- throughput --------------------------------------------------------------------------------
def test_throughput_counts_uneven_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 10.0, 12.0])
    with monkeypatch.context() as patch:
        patch.setattr("unisono.utils.reporting.time.perf_counter", lambda: next(times))
        meter = un.utils.Throughput(window=2)
        assert math.isnan(meter.read().samples_per_s)
        for samples in (10, 20, 0):
            meter.step(samples)
        assert meter.read() == (20 / 3, 20, 3.0, 30)
        meter.restart()
        meter.step(1)
        assert meter.read() == (0.5, 1, 2.0, 31)

    def program(comm: un.Communicator) -> un.utils.Rate:
        meter = un.utils.Throughput(comm)
        for _ in range(comm.rank):
            meter.step(2**53 + 1)
        return meter.read()

    for rate in run_ranks(program, 3):
        assert rate.samples == rate.window_samples == 3 * (2**53 + 1)


def test_throughput_arguments() -> None:
    with pytest.raises(ValueError, match="window must be at least 1 step, not 0"):
        un.utils.Throughput(window=0)
    with pytest.raises(ValueError, match="must not be negative"):
        un.utils.Throughput().step(-1)
    with pytest.raises(TypeError):
        un.utils.Throughput().step(1.5)  # type: ignore[arg-type]
