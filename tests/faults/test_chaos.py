"""Ranks are killed at moments that a seed draws: the training ends right, or says why not; and nothing is left."""

from __future__ import annotations

import gc
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import control_of, engine_of
from leaks import held, wait_until_as
from small_training import Story, check, train

import unisono as un
from unisono.control.local import LocalHub
from unisono.errors import CommError, PeerLostError
from unisono.testing import run_ranks
from unisono.testing.pools import pool

SIZE, EPOCHS = 4, 6
SEEDS = range(25)


def chaos(seed: int, backend: str) -> list[Any]:
    """A run in which up to three of four ranks die, at any time."""
    draw = random.Random(seed)
    victims = draw.sample(range(SIZE), draw.choice([1, 1, 2, 2, 3]))
    deaths = {rank: ("time", draw.uniform(0.0, 0.4)) for rank in victims}
    ends = un.launch(train, SIZE, backend, (deaths, EPOCHS), threads=1, timeout=20.0, on_failure="continue")
    for rank, end in enumerate(ends):
        named = isinstance(end, PeerLostError if rank in victims else CommError)
        assert isinstance(end, Story) or named, f"seed {seed}: rank {rank} ended by {end!r}"
    stories = [end for end in ends if isinstance(end, Story)]
    # Errors are for ranks that cannot continue; a surviving rank can.
    assert len(stories) >= SIZE - len(victims), f"seed {seed}: {ends}"
    # A rank that died after the end reports nothing; its report would be equal.
    check([story for rank, story in enumerate(ends) if isinstance(story, Story) and rank not in victims], EPOCHS)
    return stories


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs of this machine have theirs where they always are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s == 0 else pytest.mark.soak) for s in SEEDS])
def test_sigkill(seed: int, backend: str) -> None:
    un.launch(lambda comm: None, 1, backend)
    before = held()
    chaos(seed, backend)
    more = wait_until_as(before)
    assert not more, f"seed {seed} has left {more}"


def make_and_close(comm: Any, count: int) -> tuple[int, str]:
    """Return the additional keys of the control plane after many groups, and other leaks of this process.

    What waits for the garbage collector counts as held.
    """
    comm.dup().close()
    comm.barrier()
    gc.collect()
    gc.disable()
    try:
        keys, before = control_of(comm).num_keys(), held()
        for _ in range(count):
            part = comm.dup()
            part.all_reduce(torch.ones(2))
            part.close()
        del part
        comm.barrier()
        return control_of(comm).num_keys() - keys, wait_until_as(before, "threads", "descriptors", "processes")
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_many_groups_leak_nothing(backend: str, count: int) -> None:
    for _ in range(max(1, count // 100)):
        for keys, more in pool(backend, 2).run(make_and_close, min(count, 100)):
            assert keys <= 0, f"{keys} keys are left"
            assert not more, f"{count} groups have left {more}"


def test_closed_group_frees_its_state_in_the_hub() -> None:
    def program(comm: Any) -> None:
        for number in range(3):
            part = comm.dup()
            control_of(part).share(f"{engine_of(part).group.name}/thing", lambda number=number: [number])
            part.close()
        control_of(comm).share("for all", list)

    hubs: list[LocalHub] = []

    def make() -> LocalHub:
        hubs.append(LocalHub())
        return hubs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono.launcher.api.LocalHub", make)
        run_ranks(program, 2)
    assert set(hubs[0].shared.objects) == {"for all", "thread/mail"}
