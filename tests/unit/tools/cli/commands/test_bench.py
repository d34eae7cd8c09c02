"""`unisono bench` for real: runs, peers, traffic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from printed import printed

import unisono as un
from unisono.tools import bench
from unisono.tools.bench import Settings
from unisono.tools.bench.traffic import MemoryTraffic
from unisono.tools.cli import main

SHORT = ["--seconds", "0.01"]


# -- a real run --------------------------------------------------------------------------------------------------------
def test_table_json_and_columns(capfd: pytest.CaptureFixture[str]) -> None:
    settings = Settings(sizes=(8, 65536), backend="shm", against=("gloo", "roofline"), seconds=0.01)
    results = bench.run(settings, shown=True)
    title, names, _, first, second = printed(capfd.readouterr().out)
    assert title.startswith("# all_reduce, 2 ranks, shm, ordinary memory, warm caches")
    assert names.split() == [
        *("#", "size", "count", "type", "op", "algorithm", "time", "algbw", "busbw", "#wrong"),
        *("gloo", "gloo/own", "quartiles", "roofline", "roofline/own", "quartiles"),
    ]
    assert first.split()[:5] == ["8", "2", "float32", "sum", "native"]
    assert second.split()[:2] == ["65536", "16384"]
    assert bench.summary(results) == "# wrong elements: none"
    held = json.loads(json.dumps(bench.as_json(settings, results)))
    assert held["machine"]["torch"] == torch.__version__
    assert held["settings"]["backend"] == "shm"
    assert [found["nbytes"] for found in held["results"]] == [8, 65536]
    for found, shown in zip(held["results"], (first, second), strict=True):
        assert found["samples"] >= 9
        assert found["wrong"] == found["against"]["gloo"]["wrong"] == 0
        ratio = found["against"]["gloo"]["ratio"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert f"{ratio['low']:.2f}..{ratio['high']:.2f}" in shown


def test_command_prints_the_table_or_json(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["bench", *SHORT, "--sizes", "8", "--backend", "thread"]
    assert main(options) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith("# all_reduce, 2 ranks, thread")
    assert said[-1] == "# wrong elements: none"
    assert main([*options, "--json"]) == 0
    assert [found["nbytes"] for found in json.loads(capfd.readouterr().out)["results"]] == [8]


@pytest.mark.parametrize(
    "collective",
    [pytest.param(name, marks=[pytest.mark.soak] * (i % 2)) for i, name in enumerate(bench.COLLECTIVES)],
)
def test_every_collective_against_gloo(collective: str) -> None:
    settings = Settings(collective, "thread", 3, (1000,), against=("gloo",), seconds=0.001, least=1)
    (found,) = bench.run(settings)
    assert found.wrong == found.against["gloo"].wrong == 0
    assert found.algorithm in un.algorithms.ALGORITHMS[collective].names()


def test_symmetric_and_cold() -> None:
    settings = Settings(sizes=(1 << 20,), backend="shm", registered=True, cold=True, seconds=0.01, least=2)
    (found,) = bench.run(settings)
    assert (found.algorithm, found.wrong) == ("native", 0)
    assert found.samples >= 2


@pytest.mark.parametrize("op", ["avg", *(pytest.param(op, marks=pytest.mark.soak) for op in ("product", "max"))])
def test_other_reductions_are_verified(op: str) -> None:
    settings = Settings(backend="thread", sizes=(4096,), dtype="bfloat16", op=op, ranks=3, seconds=0.001)
    assert bench.run(settings)[0].wrong == 0


@pytest.mark.soak
def test_mpi_against_unisono() -> None:
    settings = Settings(backend="shm", sizes=(4096,), against=("mpi",), seconds=0.01)
    (found,) = bench.run(settings)
    assert found.wrong == found.against["mpi"].wrong == 0


@pytest.mark.soak
def test_error_in_one_rank_under_mpi_ends_all() -> None:
    with pytest.raises(ValueError, match="a mistake"):
        bench.on_ranks(_fail_on_rank_1, 2, "shm", under_mpirun=True)


def _fail_on_rank_1(comm: un.Communicator, folder: Path) -> None:
    from mpi4py import MPI

    if comm.rank == 1:
        raise ValueError("a mistake")
    MPI.COMM_WORLD.Barrier()


def test_traffic_of_torch_operations() -> None:
    one, two, out = (torch.ones(100) for _ in range(3))

    def of(operation: Callable[[], object]) -> MemoryTraffic:
        with bench.counted() as traffic:
            operation()
        return traffic

    assert of(lambda: torch.add(one, two, out=out)) == MemoryTraffic(800, 400, 0)
    assert of(lambda: one[:50].copy_(two[50:])) == MemoryTraffic(200, 200, 0)
    assert of(lambda: one.add_(two)) == MemoryTraffic(800, 400, 0)
    assert of(lambda: torch.stack([one, two])) == MemoryTraffic(800, 800, 800)
    assert of(lambda: torch.empty(100)) == MemoryTraffic(0, 0, 400)
    assert of(lambda: one.view(10, 10).split(2)) == MemoryTraffic(0, 0, 0)
