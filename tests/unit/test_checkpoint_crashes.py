"""Whatever instant a save is cut off at, and whatever fails in it: the previous checkpoint loads, or the new one."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.checkpoint import NoCheckpointError, StorageError
from unisono.testing import run_ranks

CRASHER = Path(__file__).with_name("checkpoint_crasher.py")
Patch = pytest.MonkeyPatch


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, where there is one: to sync a disk takes a hundred times as long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


def crash(folder: Path, *what: str) -> list[dict[str, int]]:
    """What the crasher found."""
    given = [sys.executable, str(CRASHER), str(folder), *what]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(given, capture_output=True, text=True, env={**os.environ, **one_thread}, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_crash_at_every_fourth_call_and_some_kills(folder: Path) -> None:
    found, killed = crash(folder, "calls:1:4", "kills:2:4")
    assert found["crashes"] > 15
    assert found["old"] > 0 < found["new"]
    assert killed["crashes"] == 4


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
def test_an_error_is_raised_on_all_ranks_and_the_old_one_stays(folder: Path, name: str, code: int) -> None:
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
        assert all(isinstance(error, StorageError) for error in errors), errors
        assert all(os.strerror(code) in str(error) for error in errors)
        assert un.checkpoint.load(path)["n"] in (1.0, 2.0)
        run_ranks(lambda comm, path=path: un.checkpoint.save(path, states(3.0), comm), 2)
        assert un.checkpoint.load(path)["n"] == 3.0
        assert sum(1 for entry in path.iterdir() if entry.is_file()) == 3


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: Patch) -> None:
    un.checkpoint.save(folder / "a", states(1.0))
    before = sorted(folder.rglob("*"))
    Failing(monkeypatch, folder, "write", 1, errno.ENOSPC)
    with pytest.raises(StorageError, match="No space left on device"):
        un.checkpoint.save(folder / "a", states(2.0))
    assert sorted(folder.rglob("*")) == before


def test_a_directory_that_vanishes(folder: Path) -> None:
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


# -- loss of power -----------------------------------------------------------------------------


class Journal:
    """Notes everything that is done to files below a folder, in order."""

    def __init__(self, patch: Patch, folder: Path) -> None:
        self.folder, self.done = folder, list[tuple[Any, ...]]()
        self._names: dict[int, Path] = {}
        for name in ("open", "write", "fsync", "close", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **options: Any) -> Any:
            result = real(*given, **options)
            getattr(self, f"_{name}")(result, *given)
            return result

        return wrapped

    def _open(self, fd: int, path: Any, flags: int, *_: Any) -> None:
        self._names[fd] = Path(path).absolute()
        if flags & os.O_CREAT:
            self.done.append(("create", self._names[fd]))

    def _write(self, count: int, fd: int, data: Any) -> None:
        if fd in self._names:
            self.done.append(("write", self._names[fd], bytes(data[:count])))

    def _fsync(self, _: None, fd: int) -> None:
        self.done.append(("sync", self._names[fd]))

    def _close(self, _: None, fd: int) -> None:
        self._names.pop(fd, None)

    def _replace(self, _: None, source: Any, target: Any) -> None:
        self.done.append(("rename", Path(source), Path(target)))

    def _unlink(self, _: None, path: Any, **__: Any) -> None:
        self.done.append(("unlink", Path(path)))

    def _mkdir(self, _: None, path: Any, *__: Any) -> None:
        self.done.append(("mkdir", Path(path)))


class Disk:
    """What a disk may hold after a loss of power: all that was synced, and of the rest whatever luck keeps.

    Each change of a name, and each byte written, may have got there or not, in any order.
    """

    def __init__(self, luck: Callable[[], bool]) -> None:
        self._luck = luck
        self._names: dict[Path, list[bytes] | None] = {}
        self._durable_names: dict[Path, list[bytes] | None] = {}
        self._pending: list[tuple[Path, list[bytes] | None, bool]] = []
        self._synced: dict[int, int] = {}

    def do(self, what: str, path: Path, more: Any = None) -> None:
        getattr(self, what)(path, more)

    def mkdir(self, path: Path, _: None) -> None:
        self._change(path, None, True)

    def create(self, path: Path, _: None) -> None:
        self._change(path, [], True)

    def write(self, path: Path, data: bytes) -> None:
        content = self._names[path]
        assert content is not None
        content.append(data)

    def rename(self, source: Path, target: Path) -> None:
        content = self._names[source]
        self._change(source, content, False)
        self._change(target, content, True)

    def unlink(self, path: Path, _: None) -> None:
        self._change(path, self._names[path], False)

    def sync(self, path: Path, _: None) -> None:
        content = self._names.get(path)
        if content is not None:
            self._synced[id(content)] = len(content)
        for change in [change for change in self._pending if change[0].parent == path]:
            self._pending.remove(change)
            self._apply(self._durable_names, *change)

    def _change(self, path: Path, content: list[bytes] | None, there: bool) -> None:
        self._apply(self._names, path, content, there)
        self._pending.append((path, content, there))

    @staticmethod
    def _apply(names: dict[Path, Any], path: Path, content: list[bytes] | None, there: bool) -> None:
        if there:
            names[path] = content
        else:
            names.pop(path, None)

    def after_the_crash(self, old: Path, new: Path) -> None:
        """Build it in another folder."""
        names = dict(self._durable_names)
        for change in self._pending:
            if self._luck():
                self._apply(names, *change)
        for path, content in names.items():
            if content is None and (new / path.relative_to(old)).parent.is_dir():
                (new / path.relative_to(old)).mkdir(exist_ok=True)
        for path, content in names.items():
            there = new / path.relative_to(old)
            if content is not None and there.parent.is_dir():
                kept = self._synced.get(id(content), 0)
                rest = [part if self._luck() else bytes(len(part)) for part in content[kept:] if self._luck()]
                there.write_bytes(b"".join([*content[:kept], *rest]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_of_power_at_any_instant(folder: Path, monkeypatch: Patch, ranks: int) -> None:
    real, chance = folder / "real", random.Random(1)
    real.mkdir()
    with monkeypatch.context() as patch:
        journal = Journal(patch, folder)
        for number in (1.0, 2.0, 3.0):
            run_ranks(lambda comm, n=number: un.checkpoint.save(real / "below" / "name", states(n), comm), ranks)
            journal.done.append(("acknowledged", number))
    lucks = [lambda: True, lambda: False, *[lambda: chance.random() < 0.5] * 3]
    seen = set()
    for instant in range(len(journal.done) + 1):
        least = max([n for what, n, *_ in journal.done[:instant] if what == "acknowledged"], default=0.0)
        for number, luck in enumerate(lucks):
            disk = Disk(luck)
            for change in journal.done[:instant]:
                if change[0] != "acknowledged":
                    disk.do(*change)
            new = folder / f"{instant}-{number}"
            new.mkdir()
            disk.after_the_crash(real, new)
            seen.add(found := number_in(new / "below" / "name"))
            assert least <= found <= least + 1, (
                f"after {instant} of {len(journal.done)}: {journal.done[instant - 1][:2]}"
            )
    assert seen == {0.0, 1.0, 2.0, 3.0}


def number_in(path: Path) -> float:
    """Which save it is; 0 if there is none. It must be whole."""
    try:
        state = un.checkpoint.load(path)
    except NoCheckpointError:
        return 0.0
    assert torch.equal(state["w"], states(state["n"])["w"])
    return float(state["n"])
