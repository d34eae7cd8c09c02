"""Whatever instant a save is cut off at, and whatever fails in it: the previous checkpoint loads, or the new one."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_crasher import crashes, forkserver

import unisono as un
from unisono.checkpoint import CheckpointError, NoCheckpointError, StorageError
from unisono.checkpoint.storage import LocalSink, LocalStorage
from unisono.testing import run_ranks

Patch = pytest.MonkeyPatch


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, where there is one: to sync a disk takes a hundred times as long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


def crash(folder: Path, *what: str) -> list[dict[str, int]]:
    """Return the result of the crasher, which forks, and therefore needs a process without other threads."""
    with ProcessPoolExecutor(1, mp_context=forkserver()) as process:
        return process.submit(crashes, folder, *what).result()


def test_crash_at_every_eighth_call_and_some_kills(folder: Path) -> None:
    found, killed = crash(folder, "calls:1:8", "kills:2:2")
    assert found["crashes"] > 7
    assert found["old"] > 0 < found["new"]
    assert killed["crashes"] == 2


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_crash_at_every_call(folder: Path, ranks: int) -> None:
    (found,) = crash(folder, f"calls:{ranks}:1")
    assert found["crashes"] > 60
    assert found["old"] > 0 < found["new"]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_200_kills(tmp_path: Path, ranks: int) -> None:
    (found,) = crash(tmp_path, f"kills:{ranks}:200")
    assert found["crashes"] == 200


# -- errors of the storage ---------------------------------------------------------------------


class Failing:
    """Lets a function of `os` fail at its so-many-th call on files below a folder."""

    def __init__(self, patch: Patch, folder: Path, name: str, at: int, code: int) -> None:
        self.left, self.failed = at, False
        real: Callable[..., Any] = getattr(os, name)

        def wrapped(what: Any, *rest: Any, **options: Any) -> Any:
            if self.concerns(what, folder):
                self.left -= 1
                if self.left == 0:
                    self.failed = True
                    raise OSError(code, os.strerror(code))
            return real(what, *rest, **options)

        patch.setattr(os, name, wrapped)

    @staticmethod
    def concerns(what: Any, folder: Path) -> bool:
        where = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else Path(os.fsdecode(what))
        return folder in [where, *where.parents]


def states(number: float) -> dict[str, Any]:
    return {"w": torch.full((3000,), number), "n": number}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("open", errno.EROFS),
        ("write", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("replace", errno.EIO),
        ("mkdir", errno.EROFS),
    ],
)
def test_error_is_raised_on_all_ranks_and_the_old_checkpoint_stays(folder: Path, name: str, code: int) -> None:
    for at in range(1, 12):
        path = folder / f"{name}{at}"
        run_ranks(lambda comm, path=path: un.checkpoint.save(path, states(1.0), comm), 2)
        target = path if name != "mkdir" else path / "below"

        def program(comm: un.Communicator, target: Path = target) -> None:
            un.checkpoint.save(target, states(2.0), comm)

        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, folder, name, at, code)
            errors = run_ranks(program, 2, on_failure="continue")
        if not failing.failed:
            assert at > 1
            assert errors == [None, None]
            return
        if errors == [None, None]:
            # It has failed when the lock was released, which the next save takes over.
            assert un.checkpoint.load(path)["n"] == 2.0
        else:
            assert all(isinstance(error, StorageError) for error in errors), errors
            assert all(os.strerror(code) in str(error) for error in errors)
            assert un.checkpoint.load(path)["n"] in (1.0, 2.0)
        run_ranks(lambda comm, path=path: un.checkpoint.save(path, states(3.0), comm), 2)
        assert un.checkpoint.load(path)["n"] == 3.0
        assert sum(1 for entry in path.iterdir() if entry.is_file()) == 3


def test_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: Patch) -> None:
    un.checkpoint.save(folder / "a", states(1.0))
    before = sorted(folder.rglob("*"))
    Failing(monkeypatch, folder, "write", 1, errno.ENOSPC)
    with pytest.raises(StorageError, match="No space left on device"):
        un.checkpoint.save(folder / "a", states(2.0))
    assert sorted(folder.rglob("*")) == before


class FullOnOne(LocalStorage):
    """A directory of one path on several hosts, each with its own disk: one disk is full."""

    def __init__(self, root: Path, *, full: bool) -> None:
        super().__init__("path", root)
        self.full = full

    def create(self, name: str) -> LocalSink:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(name)


def test_full_disk_of_one_rank_leaves_nothing_on_the_other_disks(tmp_path: Path) -> None:
    disks = [tmp_path / str(rank) for rank in range(3)]
    for disk in disks:
        disk.mkdir()

    def program(comm: un.Communicator) -> None:
        with pytest.raises(StorageError, match="No space left on device"):
            un.checkpoint.save(FullOnOne(disks[comm.rank], full=comm.rank == 2), states(1.0), comm)

    run_ranks(program, 3)
    assert [list(disk.iterdir()) for disk in disks] == [[], [], []]


class Unlisted(LocalStorage):
    """A storage that does not list new files yet, as an object store with eventual consistency."""

    def sizes(self) -> dict[str, int]:
        return {}


def test_files_that_are_not_listed_are_removed_after_a_failed_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not see"):
        un.checkpoint.save(Unlisted(str(tmp_path)), states(1.0))
    assert list(tmp_path.iterdir()) == []


def test_directory_removed_during_save(folder: Path) -> None:
    path = folder / "a"
    un.checkpoint.save(path, states(1.0))
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()
    with pytest.raises(NoCheckpointError, match="there is none"):
        un.checkpoint.load(path)
    path.write_text("a file")
    with pytest.raises(StorageError, match=r"File exists|Not a directory"):
        un.checkpoint.save(path, states(2.0))
    with pytest.raises(StorageError, match="Not a directory"):
        un.checkpoint.load(path)
