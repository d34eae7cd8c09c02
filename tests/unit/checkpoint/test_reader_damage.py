"""Damaged files: each is reported, by the tensor's name, and none loads; nor does what is no checkpoint of ours."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_samples import rewrite, same, saved, state_of

import unisono as un
from unisono.checkpoint import CheckpointError, CorruptError, FormatError, NoCheckpointError, StateError
from unisono.checkpoint.manifest import MANIFEST
from unisono.testing import run_ranks


class Averaged:
    """An object whose state is collective."""

    def __init__(self, comm: un.Communicator) -> None:
        self.comm, self.total = comm, torch.ones(3)

    def state_dict(self) -> dict[str, torch.Tensor]:
        total = self.total.clone()
        self.comm.all_reduce(total)
        return {"total": total}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


def test_truncated_file_is_reported_before_any_rank_asks_an_object_for_its_state(tmp_path: Path) -> None:
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, {"it": Averaged(comm)}, comm), 2)
    file = next(tmp_path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 4)

    def program(comm: un.Communicator) -> None:
        with pytest.raises(CorruptError, match="instead of"):
            un.checkpoint.load(tmp_path, {"it": Averaged(comm)}, comm, timeout=20)

    run_ranks(program, 2)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


class Damage:
    """Ways to damage a file; each says which bytes it has touched."""

    def __init__(self, path: Path, other: Path, chance: random.Random) -> None:
        self.path, self.other, self.chance = path, other, chance

    def apply(self, kind: str) -> range:
        data = bytearray(self.path.read_bytes())
        at = self.chance.randrange(len(data))
        touched = getattr(self, kind)(data, at)
        self.path.write_bytes(data)
        return touched

    def flipped_bit(self, data: bytearray, at: int) -> range:
        data[at] ^= 1 << self.chance.randrange(8)
        return range(at, at + 1)

    def zeroed_block(self, data: bytearray, at: int) -> range:
        stop = min(at + self.chance.randint(1, 512), len(data))
        if not any(data[at:stop]):
            return self.flipped_bit(data, at)
        data[at:stop] = bytes(stop - at)
        return range(at, stop)

    def truncation(self, data: bytearray, at: int) -> range:
        del data[at:]
        return range(0)

    def appended_bytes(self, data: bytearray, at: int) -> range:
        data += self.chance.randbytes(at % 100 + 1)
        return range(0)

    def mixed(self, data: bytearray, at: int) -> range:
        data[:] = self.other.read_bytes()
        return range(0)


KINDS = ("flipped_bit", "zeroed_block", "truncation", "appended_bytes", "mixed")


def damages(folder: Path, count: int) -> int:
    """Damage, look, repair, so many times; how many there were, as a manifest has no other to be mixed with."""
    done = 0
    path, other = saved(folder / "one", 1), saved(folder / "other", 2)
    manifest = un.checkpoint.open_archive(path).manifest
    names, others = sorted(p.name for p in path.iterdir()), sorted(p.name for p in other.iterdir())
    chance = random.Random(3)
    target = state_of(9)
    for number in range(count):
        index = chance.randrange(len(names))
        file = path / names[index]
        whole = file.read_bytes()
        kind = KINDS[number % len(KINDS)]
        if file.name == MANIFEST and kind == "mixed":
            continue
        touched = Damage(file, other / others[index], chance).apply(kind)
        with pytest.raises(CheckpointError) as caught:
            un.checkpoint.load(path, target)
        assert isinstance(caught.value, CorruptError | FormatError)
        said = "\n".join([str(caught.value), *caught.value.__notes__])
        assert caught.value.tensors, said
        assert repr(caught.value.tensors[0]) in said
        assert str(folder / "other") in said, "the good one is not offered"
        position = [f.name for f in manifest.files].index(file.name) if file.name != MANIFEST else None
        for name, entry in manifest.tensors.items():
            for piece in entry.pieces:
                if piece.file == position and range(max(piece.start, touched.start), min(piece.stop, touched.stop)):
                    assert name in caught.value.tensors, f"{kind} in {name}: {said}"
        with pytest.raises(CheckpointError):
            un.checkpoint.verify(path)
        file.write_bytes(whole)
        done += 1
    assert same(target, state_of(9)), "a damaged checkpoint was loaded in part"
    un.checkpoint.load(path, target)
    assert same(target, state_of(1))
    return done


def test_damaged_checkpoints(folder: Path) -> None:
    assert damages(folder / "short", 60) > 40


@pytest.mark.soak
def test_1000_damaged_checkpoints(folder: Path) -> None:
    assert damages(folder / "long", 1250) >= 1000


def test_damage_is_reported_on_all_ranks_and_by_open_archive(folder: Path) -> None:
    path = saved(folder / "all", 1)
    file = max(path.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with un.checkpoint.open_archive(path) as archive:
        bad = [name for name in archive if not readable(archive, name)]
    assert len(bad) == 1

    def program(comm: un.Communicator) -> None:
        un.checkpoint.load(path, state_of(0), comm)

    errors = run_ranks(program, 3, on_failure="continue")
    assert [type(error) for error in errors] == [CorruptError] * 3
    assert all(error.tensors == (bad[0],) and bad[0] in str(error) for error in errors)
    run_ranks(lambda comm: un.checkpoint.load(path, state_of(0), comm, check=False), 2)


def test_header_is_checked(folder: Path) -> None:
    path = saved(folder / "header", 1, 1)
    file = next(path.glob("*.safetensors"))
    whole = file.read_bytes()
    for at in (0, 7, 8, 20, int.from_bytes(whole[:8], "little") + 7):
        data = bytearray(whole)
        data[at] ^= 2
        file.write_bytes(data)
        with pytest.raises(CorruptError, match=f"damaged: the header of {file.name}, the file of 'model.embedding'"):
            un.checkpoint.load(path, state_of(3))
        with pytest.raises(CorruptError, match="the header of"):
            un.checkpoint.verify(path)


def readable(archive: un.checkpoint.Archive, name: str) -> bool:
    try:
        archive[name]
    except CorruptError as error:
        return error.tensors != (name,)
    return True


def test_large_damaged_checkpoint_reports_partial_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.checkpoint.loader._SMALL", 0)
    path = saved(folder / "large" / "bad", 1)
    saved(folder / "large" / "good", 1)
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"damaged: '.*\nthe state is partly overwritten\nthe last good checkpoint"):
        un.checkpoint.load(path, state_of(9))
    target = state_of(9)
    with pytest.raises(CorruptError):
        un.checkpoint.load(path, target, check="first")
    assert same(target, state_of(9))


# -- other things that are no checkpoint of ours --------------------------------------------------


def test_newer_format_is_rejected(folder: Path) -> None:
    path = saved(folder / "newer", 1)
    rewrite(path, lambda whole: whole.update(version=7, tensors="who knows"))
    with pytest.raises(
        FormatError, match=r"format version 7, but this unisono reads versions up to 1; update unisono\nthere is no"
    ):
        un.checkpoint.load(path)
    text = (path / MANIFEST).read_text().replace('"version":7', '"version":8')
    (path / MANIFEST).write_text(text)
    with pytest.raises(FormatError, match=r"format version 8.*or manifest.json is damaged"):
        un.checkpoint.load(path)


def test_unfinished_checkpoint_is_rejected(folder: Path) -> None:
    path = saved(folder / "unfinished" / "new", 1)
    saved(folder / "unfinished" / "old", 1)
    (path / MANIFEST).unlink()
    with pytest.raises(NoCheckpointError, match=r"never finished\nthe last good checkpoint beside it is .*/old"):
        un.checkpoint.load(path)
    assert un.checkpoint.latest(folder / "unfinished") == str(folder / "unfinished" / "old")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "manifest.json", ""])
def test_file_names_cannot_leave_the_directory(folder: Path, name: str) -> None:
    path = saved(folder / "names", 1)
    rewrite(path, lambda whole: whole["files"][0].__setitem__(0, name))
    with pytest.raises(FormatError, match="is not allowed there"):
        un.checkpoint.load(path)


def test_links_and_pipes_are_rejected(folder: Path) -> None:
    path = saved(folder / "links", 1)
    file = next(path.glob("*.safetensors"))
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    with pytest.raises(CorruptError, match=f"{file.name} is missing"):
        un.checkpoint.load(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CorruptError, match=f"{file.name} is missing"):
        un.checkpoint.load(path)


def test_file_that_goes_after_the_manifest_was_read_is_missing(folder: Path) -> None:
    path = saved(folder / "gone", 1)
    with un.checkpoint.open_archive(path) as archive:
        file = next(path.glob("*.safetensors"))
        file.unlink()
        with pytest.raises(CorruptError, match=f"{file.name} is missing"):
            archive[next(iter(archive))]


def test_link_that_takes_a_files_place_after_the_manifest_was_read_is_not_followed(folder: Path) -> None:
    path = saved(folder / "linked", 1)
    with un.checkpoint.open_archive(path) as archive:
        file = next(path.glob("*.safetensors"))
        file.rename(folder / "the same bytes")
        file.symlink_to(folder / "the same bytes")
        with pytest.raises(OSError, match="symbolic links"):
            archive[next(iter(archive))]


@pytest.mark.parametrize("where", ["on disk", "in memory"])
def test_tensors_of_a_damaged_manifest_are_named_by_the_files(folder: Path, where: str) -> None:
    path = str(folder / "headers") if where == "on disk" else "memory://headers/last"
    names = ["bias", "weight"]
    un.checkpoint.save(path, {name: torch.ones(3) for name in names})
    filesystem, inner = fsspec.url_to_fs(path)
    # A file of the user's, before and after the others.
    for name in ("0-notes.txt", "zz-notes.txt"):
        filesystem.pipe_file(f"{inner}/{name}", b"mine")
    data = filesystem.cat_file(f"{inner}/{MANIFEST}")
    filesystem.pipe_file(f"{inner}/{MANIFEST}", data[: len(data) // 2])
    with pytest.raises(CorruptError, match="its tensors are 'bias', 'weight'") as caught:
        un.checkpoint.load(path)
    assert sorted(caught.value.tensors) == names


def test_wrong_model_is_rejected(folder: Path) -> None:
    path = saved(folder / "model", 1)
    target = state_of(0)
    target["model"]["bias"] = torch.zeros(31)
    target["model"]["gate"] = target["model"].pop("scale")
    with pytest.raises(
        StateError, match=r"has 'model.scale', which the state lacks; it lacks 'model.gate'.*'model.bias' has"
    ):
        un.checkpoint.load(path, target)
    errors = run_ranks(lambda comm: un.checkpoint.load(path, target, comm), 2, on_failure="continue")
    assert [type(error) for error in errors] == [StateError] * 2
    shutil.rmtree(path)
