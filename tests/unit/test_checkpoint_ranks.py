"""Saved and loaded by ranks: any number of them, the same errors everywhere, and each byte from the disk once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.checkpoint import Checkpointer, NoCheckpointError, PerRank, StorageError
from unisono.checkpoint.storage.local import LocalSource, LocalStorage
from unisono.errors import MismatchError
from unisono.testing import pool, run_ranks


def state_of(seed: int) -> dict[str, Any]:
    torch_state = torch.Generator().manual_seed(seed)
    big = torch.randn(60_001, generator=torch_state)
    return {"big": big, "small": torch.arange(5) + seed, "none": torch.empty(0, 2), "step": seed}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["step"] == other["step"] and all(torch.equal(one[n], other[n]) for n in ("big", "small", "none"))


@pytest.mark.parametrize("saved", [1, 2, 5])
@pytest.mark.parametrize("loaded", [1, 3, 4])
def test_any_number_of_ranks_loads(tmp_path: Path, saved: int, loaded: int) -> None:
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, state_of(1), comm), saved)
    sizes = sorted(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert len(sizes) == saved
    assert sizes[-1] - sizes[0] < 5000
    un.checkpoint.verify(tmp_path)

    def program(comm: un.Communicator) -> bool:
        fresh = un.checkpoint.load(tmp_path, None, comm)
        return same(fresh, state_of(1)) and same(un.checkpoint.load(tmp_path, state_of(2), comm), state_of(1))

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


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_each_byte_is_read_once_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """From a storage of which the host's memory keeps nothing."""
    monkeypatch.setattr(LocalStorage, "kept", False)
    monkeypatch.setattr("unisono.checkpoint.loading._SMALL", small)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 16)
    read = dict[Path, int]()
    real, lock = LocalSource.read, threading.Lock()

    def counted(self: LocalSource, start: int, into: memoryview) -> None:
        with lock:
            read[self._path] = read.get(self._path, 0) + len(into)
        real(self, start, into)

    run_ranks(lambda comm: un.checkpoint.save(tmp_path, state_of(1), comm), 3)
    monkeypatch.setattr(LocalSource, "read", counted)
    found = run_ranks(lambda comm: un.checkpoint.load(tmp_path, state_of(2), comm), 4)
    assert all(same(state, state_of(1)) for state in found)
    assert read == {file: file.stat().st_size for file in tmp_path.iterdir()}


class Reads:
    """Who reads what of a checkpoint's files, while one rank is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: dict[tuple[Path, int], list[int]] = {}
        self.too_early: list[tuple[Path, int]] = []
        self.most_kept = 0
        # Of those, what is being read for the first time.
        self._under_way: set[tuple[Path, int]] = set()
        self._changed, self._real, self._slow = threading.Condition(), LocalSource.read, 0
        monkeypatch.setattr(LocalSource, "read", self.reader())

    def reader(self) -> Any:
        """Bound to nothing, so that a class makes a method of it."""

        def read(source: LocalSource, start: int, into: memoryview) -> None:
            self._read(source, start, into)

        return read

    def _read(self, source: LocalSource, start: int, into: memoryview) -> None:
        part, reader = (source._path, start), threading.get_ident()
        with self._changed:
            if part in self._under_way:
                self.too_early.append(part)
            self.begun.setdefault(part, []).append(reader)
            if self.begun[part] == [reader]:
                self._under_way.add(part)
            self.most_kept = max(self.most_kept, sum(len(readers) < 4 for readers in self.begun.values()))
            self._changed.notify_all()
            if not self._slow and source._path.suffix == ".safetensors":
                self._slow = reader
                # Time for the others to go astray; if all is well, they wait.
                self._changed.wait_for(lambda: self.too_early, 0.2)
        self._real(source, start, into)
        with self._changed:
            if self.begun[part][0] == reader:
                self._under_way.discard(part)


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_what_one_rank_reads_from_the_disk_others_find_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr("unisono.checkpoint.loading._SMALL", small)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 14)
    monkeypatch.setattr("unisono.checkpoint.filling._STRETCH", 2)
    saved = {f"t{number}": torch.randn(2048) for number in range(64)}
    un.checkpoint.save(tmp_path, saved)
    reads = Reads(monkeypatch)
    target = {name: torch.zeros(2048) for name in saved}
    found = run_ranks(lambda comm: un.checkpoint.load(tmp_path, {k: v.clone() for k, v in target.items()}, comm), 4)
    assert all(torch.equal(state[name], saved[name]) for state in found for name in saved)
    tensors = {part: readers for part, readers in reads.begun.items() if part[0].suffix == ".safetensors"}
    assert len(tensors) == 65
    assert all(len(readers) == len(set(readers)) == 4 for readers in tensors.values())
    assert not reads.too_early
    if not small:
        # Two stretches of each rank: of two windows of two tensors, and headers.
        assert reads.most_kept <= 4 * 2 * 2 * 2 + 2


def test_ranks_that_want_different_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.checkpoint.loading._SMALL", 0)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 14)
    saved = {f"t{number}": torch.full((2048,), float(number)) for number in range(9)}
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, saved, comm), 2)

    def program(comm: un.Communicator) -> bool:
        mine = {f"t{number}": torch.zeros(2048) for number in range(comm.rank, 9, 3)}
        loaded = un.checkpoint.load(tmp_path, mine, comm)
        return all(torch.equal(loaded[name], saved[name]) for name in mine)

    assert run_ranks(program, 3) == [True] * 3


@pytest.mark.parametrize("kept", [False, True])
def test_who_fails_while_reading_does_not_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(LocalStorage, "kept", kept)
    monkeypatch.setattr("unisono.checkpoint.loading._SMALL", 0)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 14)
    monkeypatch.setattr("unisono.checkpoint.filling._STRETCH", 1)
    un.checkpoint.save(tmp_path, {f"t{number}": torch.zeros(2048) for number in range(9)})

    def program(comm: un.Communicator) -> int:
        def tell(done: int, total: int) -> None:
            if comm.rank == 1 and done * 2 > total:
                raise OSError(5, "the disk is on fire")

        with pytest.raises(StorageError, match=r"rank 1 of 3.*the disk is on fire"):
            un.checkpoint.load(tmp_path, None, comm, progress=tell)
        return len(un.checkpoint.load(tmp_path, None, comm))

    assert run_ranks(program, 3) == [9] * 3


def test_each_host_reads_for_itself(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, state_of(1))

    def program(comm: un.Communicator) -> bool:
        comm.hosts = ((0, 2, 3), (1,))
        return same(un.checkpoint.load(tmp_path, state_of(2), comm), state_of(1))

    assert run_ranks(program, 4) == [True] * 4


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
def test_ranks_that_differ_are_named_and_nothing_is_written(tmp_path: Path, change: Any, said: str) -> None:
    def program(comm: un.Communicator) -> Path | None:
        state = state_of(1)
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


def test_other_paths_are_noticed(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        un.checkpoint.save(tmp_path / str(comm.rank), {}, comm)

    errors = run_ranks(program, 2, on_failure="continue")
    assert all(isinstance(error, MismatchError) and "(the path)" in str(error) for error in errors)


def test_sync_makes_newcomers_equal() -> None:
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


def test_sync_of_another_model_is_refused_everywhere() -> None:
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
    assert un.checkpoint.open(tmp_path).manifest.extra["note"] == "first"
    for read in (
        lambda tell: un.checkpoint.load(tmp_path, progress=tell),
        lambda tell: un.checkpoint.verify(tmp_path, progress=tell),
    ):
        told.clear()
        read(lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1] > 4000


def test_a_reader_meets_a_save_over_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    un.checkpoint.save(tmp_path, state_of(1))
    real, times = LocalSource.__init__, []

    def between(self: LocalSource, path: Path) -> None:
        if path.suffix == ".safetensors" and not times:
            times.append(path)
            monkeypatch.setattr(LocalSource, "__init__", real)
            un.checkpoint.save(tmp_path, state_of(2))
        real(self, path)

    monkeypatch.setattr(LocalSource, "__init__", between)
    assert same(un.checkpoint.load(tmp_path, state_of(0)), state_of(2))
    assert times


def test_memory_of_other_kinds(tmp_path: Path) -> None:
    del tmp_path
    path = "memory://runs/7/last"
    run_ranks(lambda comm: un.checkpoint.save(path, state_of(1), comm), 2)
    run_ranks(lambda comm: un.checkpoint.save(path, state_of(3), comm), 2)
    assert same(un.checkpoint.load(path), state_of(3))
    assert un.checkpoint.latest("memory://runs/7") == path
    with un.checkpoint.open(path) as archive:
        assert torch.equal(archive["big"], state_of(3)["big"])
    un.checkpoint.verify(path)
    with Checkpointer("memory://runs/8", keep=1, background=False) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.save(2, state_of(2))
        assert checkpointer.steps() == [2]
    with pytest.raises(NoCheckpointError, match="the last good checkpoint beside it is memory://runs/7/last"):
        un.checkpoint.load("memory://runs/7/first")
