"""Saved and loaded by ranks: any number of them, and the same errors everywhere."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import equal, flat_of
from pairwise import short
from torch import nn

import unisono as un
from unisono.checkpoint import Checkpointer, NoCheckpointError, PerRank
from unisono.errors import MismatchError
from unisono.testing import pool, run_ranks


@short("saved, loaded", product([1, 2, 5], [1, 3, 4]), [(1, 3), (2, 1), (2, 3), (5, 4)])
def test_any_number_of_ranks_can_load(tmp_path: Path, saved: int, loaded: int) -> None:
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, flat_of(1), comm), saved)
    sizes = sorted(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert len(sizes) == saved
    assert sizes[-1] - sizes[0] < 5000
    un.checkpoint.verify(tmp_path)

    def program(comm: un.Communicator) -> bool:
        fresh = un.checkpoint.load(tmp_path, None, comm)
        return equal(fresh, flat_of(1)) and equal(un.checkpoint.load(tmp_path, flat_of(2), comm), flat_of(1))

    assert run_ranks(program, loaded) == [True] * loaded


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes(tmp_path: Path, backend: str) -> None:
    def program(comm: un.Communicator, path: str) -> bool:
        model = nn.Linear(400, 300)
        un.broadcast_parameters(model, comm)
        saving = un.checkpoint.async_save(path, {"model": model, "mine": PerRank(comm.rank)}, comm)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            model.weight += 1
        saving.wait()
        state = {"model": nn.Linear(400, 300), "mine": PerRank(None)}
        un.checkpoint.load(path, state, comm)
        equal = all(torch.equal(a, b) for a, b in zip(before, state["model"].parameters(), strict=True))
        return equal and state["mine"].obj == comm.rank

    assert pool(backend, 4).run(program, str(tmp_path), size=2) == [True, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["big"].__setitem__(60_000, 0.5), "'big': rank 1 differs from ranks 0, 2"),
        (lambda s: s.update(step=7), r"'step': rank 1 differs from ranks 0, 2 \(1 on ranks 0, 2; 7 on rank 1\)"),
        (lambda s: s.update(more=torch.zeros(2)), "'more': rank 1 differs"),
        (lambda s: s.update(small=s["small"].int()), "'small': rank 1 differs"),
        (lambda s: s.pop("none"), "'none': rank 1 differs"),
    ],
)
def test_different_ranks_are_named_and_nothing_is_written(tmp_path: Path, change: Any, said: str) -> None:
    def program(comm: un.Communicator) -> Path | None:
        state = flat_of(1)
        if comm.rank == 1:
            change(state)
        for check in (un.checkpoint.assert_in_sync, lambda s, c: un.checkpoint.save(tmp_path / "x", s, c)):
            with pytest.raises(MismatchError, match=said):
                check(state, comm)
        with pytest.raises(MismatchError, match=said):
            un.checkpoint.async_save(tmp_path / "x", state, comm).wait()
        un.checkpoint.save(tmp_path / "y", {"mine": PerRank(state)}, comm)
        return (tmp_path / "x").exists()

    assert run_ranks(program, 3) == [False] * 3


def test_dict_order_may_differ(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        state = {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.full((3,), 2.0)}
        names = sorted(state, reverse=bool(comm.rank))
        un.checkpoint.save(tmp_path, {name: state[name] for name in names}, comm)

    run_ranks(program, 2)
    assert {name: value[0].item() for name, value in un.checkpoint.load(tmp_path).items()} == {"a": 1, "b": 0, "c": 2}


@pytest.mark.parametrize(
    "state_of",
    [
        lambda rank: {"a.b": 5, "a": {"b": torch.full((3,), float(rank))}},
        lambda rank: {"a.b": rank, "a": {"b": 1}},
        lambda rank: {"a": {"b": 1}, "a.b": rank},
        lambda rank: {"a.b": 1} if rank else {"a": {"b": 1}},
    ],
)
def test_values_with_similar_paths_are_compared(tmp_path: Path, state_of: Any) -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=r"'a.b': rank 1 differs from rank 0|which dict holds what"):
            un.checkpoint.save(tmp_path, state_of(comm.rank), comm)

    run_ranks(program, 2)


def test_different_paths_are_detected(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        un.checkpoint.save(tmp_path / str(comm.rank), {}, comm)

    errors = run_ranks(program, 2, on_failure="continue")
    assert all(isinstance(error, MismatchError) and "(the path)" in str(error) for error in errors)


def test_sync_equalizes_new_ranks() -> None:
    def program(comm: un.Communicator) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Linear(300, 20)
        optimizer = torch.optim.Adam(model.parameters())
        state = {"model": model, "optimizer": optimizer, "step": comm.rank, "mine": PerRank(comm.rank)}
        if comm.rank == 2:
            with torch.no_grad():
                model.weight += 1
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
        comm.barrier()
        un.checkpoint.sync(state, comm, src=2)
        un.checkpoint.assert_in_sync(state, comm)
        moments = optimizer.state_dict()["state"][0]["exp_avg"]
        return [state["step"], state["mine"].obj, model.weight.sum().item(), moments.sum().item()]

    found = run_ranks(program, 3)
    assert [one[:2] for one in found] == [[2, 0], [2, 1], [2, 2]]
    assert found[0][2:] == found[1][2:] == found[2][2:]
    assert found[0][3] != 0


def test_sync_of_another_model_is_rejected_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> None:
        un.checkpoint.sync({"net": nn.Linear(2, 2 + comm.rank)}, comm)

    errors = run_ranks(program, 2, on_failure="continue")
    assert all("'net.weight' has shape (2, 2) in it, (3, 2) here" in str(error) for error in errors)


def test_progress_and_extra(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    state = {"w": torch.zeros(1000)}
    un.checkpoint.save(
        tmp_path, state, extra={"note": "first"}, progress=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (4000, 4000)
    assert un.checkpoint.open_archive(tmp_path).manifest.extra["note"] == "first"
    for read in (
        lambda tell: un.checkpoint.load(tmp_path, progress=tell),
        lambda tell: un.checkpoint.verify(tmp_path, progress=tell),
    ):
        told.clear()
        read(lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1] > 4000


def test_other_kinds_of_memory(tmp_path: Path) -> None:
    del tmp_path
    path = "memory://runs/7/last"
    run_ranks(lambda comm: un.checkpoint.save(path, flat_of(1), comm), 2)
    run_ranks(lambda comm: un.checkpoint.save(path, flat_of(3), comm), 2)
    assert equal(un.checkpoint.load(path), flat_of(3))
    assert un.checkpoint.latest("memory://runs/7") == path
    with un.checkpoint.open_archive(path) as archive:
        assert torch.equal(archive["big"], flat_of(3)["big"])
    un.checkpoint.verify(path)
    with Checkpointer("memory://runs/8", keep=1, background=False) as checkpointer:
        checkpointer.save(1, flat_of(1))
        checkpointer.save(2, flat_of(2))
        assert checkpointer.steps() == [2]
    with pytest.raises(NoCheckpointError, match="the last good checkpoint beside it is memory://runs/7/last"):
        un.checkpoint.load("memory://runs/7/first")


def test_device_missing_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.ones(3)})

    def program(comm: un.Communicator) -> int:
        def place(storage: Any, location: str) -> Any:
            return "nowhere" if comm.rank == 1 else storage

        with pytest.raises(TypeError, match="map_location returned 'nowhere'"):
            un.checkpoint.load(tmp_path, None, comm, place)
        return len(un.checkpoint.load(tmp_path, None, comm)["w"])

    assert run_ranks(program, 2) == [3, 3]
