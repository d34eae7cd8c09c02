"""Checkpoints that are saved or loaded wrongly; a unit test kills each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from loading import load

from unisono.checkpoint import (
    collective,
    manifest,
    reader,
    restore,
    saver,
    storage,
)
from unisono.checkpoint import loader as loading
from unisono.errors import CommError
from unisono.testing import run_ranks

UNIT = Path(__file__).parents[1] / "unit"
Patch = pytest.MonkeyPatch


@cache
def unit(name: str) -> ModuleType:
    """The unit tests, by the end of their file's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(UNIT)
        return load(UNIT / "checkpoint" / f"test_{name}.py")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


def power(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        unit("saver_power_loss").test_power_loss_at_any_instant(folder, patch, 1)


def damages(folder: Path) -> None:
    unit("reader_damage").damages(folder, 40)


def no_space(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        unit("saver_crashes").test_full_disk_leaves_nothing_behind(folder, patch)


def differences(folder: Path) -> None:
    unit("collective").test_different_ranks_are_named_and_nothing_is_written(
        folder, lambda s: s["big"].__setitem__(60_000, 0.5), "'big': rank 1 differs from ranks 0, 2"
    )


# -- saving ------------------------------------------------------------------------------------


def files_are_not_synced(patch: Patch) -> None:
    patch.setattr(storage.LocalSink, "settle", lambda self: os.close(self._fd))


def directories_are_not_synced(patch: Patch) -> None:
    patch.setattr(storage, "_sync_directory", lambda path: None)


def the_manifest_is_overwritten(patch: Patch) -> None:
    def publish(self: storage.LocalStorage, name: str, data: bytes) -> None:
        fd = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)

    patch.setattr(storage.LocalStorage, "publish", publish)


def old_files_go_before_the_new_manifest(patch: Patch) -> None:
    real = storage.LocalStorage.publish

    def publish(self: storage.LocalStorage, name: str, data: bytes) -> None:
        tensors = [file for file in self.sizes() if file.endswith(".safetensors")]
        self.remove(*[file for file in tensors if file.encode() not in data])
        real(self, name, data)

    patch.setattr(storage.LocalStorage, "publish", publish)


def the_manifest_comes_before_the_files_are_durable(patch: Patch) -> None:
    real = storage.LocalSink.settle

    def settle(self: storage.LocalSink) -> None:
        if self._path.suffix == ".safetensors":
            os.close(self._fd)
        else:
            real(self)

    patch.setattr(storage.LocalSink, "settle", settle)


def what_failed_stays(patch: Patch) -> None:
    patch.setattr(storage.LocalSink, "abandon", lambda self: os.close(self._fd))
    patch.setattr(storage.LocalStorage, "remove", lambda self, *names: None)


def ranks_are_not_compared(patch: Patch) -> None:
    patch.setattr(collective.CollectiveScope, "compare", lambda self, content, describe, advice: None)


def only_shapes_are_compared(patch: Patch) -> None:
    patch.setattr(saver, "digest", lambda data: "0" * 32)


def the_copy_is_a_view(patch: Patch) -> None:
    real = saver.prepare
    patch.setattr(saver, "prepare", lambda *given, copy: real(*given, copy=False))


def waits_in_vain(patch: Patch) -> None:
    """Shorten the wait of a save for a rank that has gone, which happens by chance."""
    patch.setattr(unit("saver_background"), "run_ranks", partial(run_ranks, timeout=1.0))


def saves_overtake_each_other(patch: Patch) -> None:
    waits_in_vain(patch)
    patch.setattr(saver, "finish_earlier", lambda path, comm: None)


# -- loading -----------------------------------------------------------------------------------


def bytes_are_not_checked(patch: Patch) -> None:
    patch.setattr(reader.Files, "corrupt_error", lambda self, bad: None)


def headers_are_not_checked(patch: Patch) -> None:
    real = reader.Files.corrupt_error
    patch.setattr(reader.Files, "corrupt_error", lambda self, bad: real(self, [block for block in bad if block.name]))


def sizes_are_not_checked(patch: Patch) -> None:
    patch.setattr(manifest, "check_size", lambda whole, index, found: None)
    patch.setattr(reader, "check_size", lambda whole, index, found: None)


def the_manifest_is_believed(patch: Patch) -> None:
    patch.setattr(manifest, "_check_tiling", lambda whole: None)


def every_rank_reads_all(patch: Patch) -> None:
    patch.setattr(loading, "ranks_of_host", lambda comm: None)


def ranks_do_not_wait_for_each_other(patch: Patch) -> None:
    real = loading.ranks_of_host

    def hasty(comm: Any) -> Any:
        host = real(comm)
        return host and SimpleNamespace(rank=host.rank, size=host.size, barrier=lambda: None, close=host.close)

    patch.setattr(loading, "ranks_of_host", hasty)


def values_may_take_any_memory(patch: Patch) -> None:
    patch.setattr(manifest, "_check_cost", lambda cost, nbytes: None)


def a_save_is_left_behind(patch: Patch) -> None:
    waits_in_vain(patch)
    patch.setattr(collective.SaveQueue, "finish", lambda self: None)


def strided_memory_is_forgotten(patch: Patch) -> None:
    patch.setattr(loading.Destination, "tensor", lambda self: self._made if self._target is None else self._target)


def shapes_do_not_matter(patch: Patch) -> None:
    patch.setattr(restore, "_misfit", lambda target, entry: "")


def unchecked_sizes(folder: Path) -> None:
    unit("reader_damage").damages(folder, 25)


def lies(folder: Path) -> None:
    unit("manifest_hostile").test_manifest_that_contradicts_its_files(folder, "belong to none, or to two")


def in_background(folder: Path) -> None:
    unit("saver_background").test_async_save_saves_a_snapshot(folder)


def one_after_another(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        unit("saver_background").test_async_save_keeps_the_earlier_checkpoint(folder, patch)


def once(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        unit("reader").test_each_byte_is_read_once_per_host(folder, patch, 0)


def in_memory(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        unit("reader").test_data_read_by_one_rank_is_shared_in_memory(folder, patch, 0)


def closing(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        unit("saver_background").test_close_waits_for_a_save(folder, patch, "whole")


def bomb(folder: Path) -> None:
    unit("manifest_hostile").test_short_values_that_expand_in_memory(folder, "lists", 300_000)


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[Path], None]]] = [
    (files_are_not_synced, power),
    (directories_are_not_synced, power),
    (the_manifest_is_overwritten, power),
    (old_files_go_before_the_new_manifest, power),
    (the_manifest_comes_before_the_files_are_durable, power),
    (what_failed_stays, no_space),
    (ranks_are_not_compared, differences),
    (only_shapes_are_compared, differences),
    (the_copy_is_a_view, in_background),
    (saves_overtake_each_other, one_after_another),
    (bytes_are_not_checked, damages),
    (headers_are_not_checked, lambda folder: unit("reader_damage").test_header_is_checked(folder)),
    (sizes_are_not_checked, unchecked_sizes),
    (the_manifest_is_believed, lies),
    (every_rank_reads_all, once),
    (ranks_do_not_wait_for_each_other, in_memory),
    pytest.param(values_may_take_any_memory, bomb, marks=pytest.mark.soak, id="values_may_take_any_memory-bomb"),
    (a_save_is_left_behind, closing),
    (strided_memory_is_forgotten, lambda folder: unit("tree").test_every_memory_layout(folder)),
    (shapes_do_not_matter, lambda folder: unit("restore").test_wrong_model_changes_nothing(folder)),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda entry: getattr(entry, "__name__", ""))
def test_mutant_is_killed(mutant: Callable[[Patch], None], test: Callable[[Path], None], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises((AssertionError, CommError, LookupError, pytest.fail.Exception)):
            test(folder)
    take_errors_of_saves()


def take_errors_of_saves() -> None:
    """See the errors of saves that a mutant has left behind, which would be printed at the end of the process."""
    while True:
        try:
            collective.raise_failed()
        except CommError:
            continue
        return


@pytest.mark.parametrize(
    "test", [power, no_space, differences, in_background, once, in_memory], ids=lambda test: test.__name__
)
def test_correct_implementation_survives(test: Callable[[Path], None], folder: Path) -> None:
    test(folder)
    assert torch.get_num_threads() == 1
