"""Reads of ranks: each byte from the disk once per host, with few open files."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import equal, flat_of

import unisono as un
from unisono.checkpoint import CorruptError, StorageError, reader
from unisono.checkpoint.storage import LocalSource, LocalStorage
from unisono.testing import run_ranks


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_each_byte_is_read_once_per_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """Read from a storage that the host does not cache."""
    monkeypatch.setattr(LocalStorage, "kept", False)
    monkeypatch.setattr("unisono.checkpoint.loader._SMALL", small)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 16)
    read = dict[Path, int]()
    real, lock = LocalSource.read, threading.Lock()

    def counted(self: LocalSource, start: int, into: memoryview) -> None:
        with lock:
            read[self._path] = read.get(self._path, 0) + len(into)
        real(self, start, into)

    run_ranks(lambda comm: un.checkpoint.save(tmp_path, flat_of(1), comm), 3)
    monkeypatch.setattr(LocalSource, "read", counted)
    found = run_ranks(lambda comm: un.checkpoint.load(tmp_path, flat_of(2), comm), 4)
    assert all(equal(state, flat_of(1)) for state in found)
    assert read == {file: file.stat().st_size for file in tmp_path.iterdir()}


class Reads:
    """Return the reads of a checkpoint's files by each rank, while one rank is slow."""

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
def test_data_read_by_one_rank_is_shared_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr("unisono.checkpoint.loader._SMALL", small)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 14)
    monkeypatch.setattr("unisono.checkpoint.loader._STRETCH", 2)
    saved = {f"t{number}": torch.randn(2048) for number in range(64)}
    un.checkpoint.save(tmp_path, saved)
    reads = Reads(monkeypatch)
    target = {name: torch.zeros(2048) for name in saved}
    found = run_ranks(lambda comm: un.checkpoint.load(tmp_path, {k: v.clone() for k, v in target.items()}, comm), 4)
    assert all(torch.equal(state[name], saved[name]) for state in found for name in saved)
    tensors = {part: readers for part, readers in reads.begun.items() if part[0].suffix == ".safetensors"}
    assert len(tensors) == 65
    header = sum(start == 0 for _, start in tensors)
    assert header == 1
    # Ranks that need not check a header do not read it.
    assert all(len(readers) == len(set(readers)) == (4 if start else 1) for (_, start), readers in tensors.items())
    assert not reads.too_early
    if not small:
        # Two stretches of each rank: of two windows of two tensors, and headers.
        assert reads.most_kept <= 4 * 2 * 2 * 2 + 2


@pytest.mark.parametrize(("told", "times"), [(True, 1), (False, 3)])
def test_shared_data_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool, times: int) -> None:
    monkeypatch.setattr("unisono.checkpoint.loader._SMALL", 0)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 14)
    un.checkpoint.save(tmp_path, {f"t{number}": torch.zeros(2048) for number in range(9)})
    checked, lock, real = [0], threading.Lock(), reader.hasher
    opened = LocalSource.__init__

    class Counted:
        def __init__(self) -> None:
            self._hash = real()
            self.hexdigest = self._hash.hexdigest

        def update(self, data: memoryview) -> None:
            with lock:
                checked[0] += len(data)
            self._hash.update(data)

    def untold(self: LocalSource, path: Path) -> None:
        opened(self, path)
        if not told:
            del self.identity

    monkeypatch.setattr(reader, "hasher", Counted)
    monkeypatch.setattr(LocalSource, "__init__", untold)
    run_ranks(lambda comm: un.checkpoint.load(tmp_path, None, comm), 3)
    (file,) = tmp_path.glob("*.safetensors")
    assert checked == [times * file.stat().st_size]


@pytest.mark.parametrize("damaged", [0, 1])
def test_ranks_check_their_own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int) -> None:
    """The damage is where another rank would read first."""
    monkeypatch.setattr("unisono.checkpoint.loader._SMALL", 0)
    un.checkpoint.save(tmp_path / "0", {"first": torch.zeros(1 << 20), "second": torch.zeros(1 << 20)})
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    (file,) = (tmp_path / str(damaged)).glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-1 if damaged == 0 else 1 << 20, os.SEEK_END if damaged == 0 else os.SEEK_SET)
        opened.write(b"\x01")

    def program(comm: un.Communicator) -> None:
        name = "second" if damaged == 0 else "first"
        with pytest.raises(CorruptError, match=f"rank {damaged} of 2.*{name}"):
            un.checkpoint.load(tmp_path / str(comm.rank), None, comm)

    run_ranks(program, 2)


def test_ranks_may_load_different_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.checkpoint.loader._SMALL", 0)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 14)
    saved = {f"t{number}": torch.full((2048,), float(number)) for number in range(9)}
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, saved, comm), 2)

    def program(comm: un.Communicator) -> bool:
        mine = {f"t{number}": torch.zeros(2048) for number in range(comm.rank, 9, 3)}
        loaded = un.checkpoint.load(tmp_path, mine, comm)
        return all(torch.equal(loaded[name], saved[name]) for name in mine)

    assert run_ranks(program, 3) == [True] * 3


@pytest.mark.parametrize("kept", [False, True])
def test_rank_failing_during_a_read_does_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(LocalStorage, "kept", kept)
    monkeypatch.setattr("unisono.checkpoint.loader._SMALL", 0)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 14)
    monkeypatch.setattr("unisono.checkpoint.loader._STRETCH", 1)
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
    un.checkpoint.save(tmp_path, flat_of(1))

    def program(comm: un.Communicator) -> bool:
        comm.hosts = ((0, 2, 3), (1,))
        return equal(un.checkpoint.load(tmp_path, flat_of(2), comm), flat_of(1))

    assert run_ranks(program, 4) == [True] * 4


def test_more_files_than_the_descriptor_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, flat_of(1), comm), 5)
    monkeypatch.setattr("unisono.checkpoint.reader._MOST_OPEN", 2)
    found = run_ranks(lambda comm: un.checkpoint.load(tmp_path, flat_of(2), comm, check="first"), 3)
    assert all(equal(state, flat_of(1)) for state in found)


def test_reader_during_a_save_to_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    un.checkpoint.save(tmp_path, flat_of(1))
    real, times = LocalSource.__init__, []

    def between(self: LocalSource, path: Path) -> None:
        if path.suffix == ".safetensors" and not times:
            times.append(path)
            monkeypatch.setattr(LocalSource, "__init__", real)
            un.checkpoint.save(tmp_path, flat_of(2))
        real(self, path)

    monkeypatch.setattr(LocalSource, "__init__", between)
    assert equal(un.checkpoint.load(tmp_path, flat_of(0)), flat_of(2))
    assert times


def test_archive_closes_its_files(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.ones(3)})
    file = next(tmp_path.glob("*.safetensors"))
    for _ in range(4):
        assert un.checkpoint.open_archive(tmp_path)["w"].sum() == 3
    gc.collect()
    links = [Path(f"/proc/self/fd/{fd}") for fd in range(3, 300)]
    assert not [link for link in links if link.exists() and link.samefile(file)]


def test_membership_test_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.ones(3)})
    with un.checkpoint.open_archive(tmp_path) as archive:
        monkeypatch.setattr(LocalSource, "view", None)
        assert "w" in archive
        assert "v" not in archive


def test_an_archive_refuses_ranks_that_did_not_save_it(tmp_path: Path) -> None:
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, {"mine": un.checkpoint.PerRank(comm.rank)}, comm), 2)
    with un.checkpoint.open_archive(tmp_path) as archive:
        assert [archive.state(rank)["mine"] for rank in range(2)] == [0, 1]
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=f"rank={rank} did not save this checkpoint: its ranks are 0 to 1"):
                archive.state(rank)
