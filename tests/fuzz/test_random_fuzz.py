"""Programs that draw random numbers compute on ranks that are threads what they compute alone in a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from random_programs import run

import unisono as un

RANKS = 3


@contextmanager
def generators_restored() -> Iterator[None]:
    saved = un.checkpoint.RNG().state_dict()
    try:
        yield
    finally:
        un.checkpoint.RNG().load_state_dict(saved)


def check(first: int, count: int, backend: str) -> None:
    """Compare programs of these numbers; each rank runs others, at the same time."""

    def programs(comm: un.Communicator) -> list[tuple[list[str], list[Any]]]:
        return [run(number) for number in range(first + comm.rank, first + count, comm.size)]

    state = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)[1].tolist()
    found = un.launch(programs, RANKS, backend)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.random.get_state(legacy=True)[1].tolist() == state[2]
    with generators_restored():
        for number in range(first, first + count):
            rank, place = (number - first) % RANKS, (number - first) // RANKS
            assert found[rank][place] == run(number), f"program {number}"


@pytest.mark.parametrize("backend", ["thread", "sim"])
def test_programs_on_threads_draw_as_in_a_process(backend: str) -> None:
    check(0, 20, backend)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 10_000, 500))
def test_many_programs_on_threads_draw_as_in_a_process(first: int) -> None:
    check(first, 500, "thread" if first % 2000 else "sim")
