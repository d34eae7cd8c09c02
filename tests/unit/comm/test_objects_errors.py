"""Values that cannot be sent: an error on every rank that was to get them, and the communicator stays in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as un
from unisono.testing import pool

SOURCE = 1


def broadcast(comm: un.Communicator, value: Any, trusted: bool) -> object:
    return comm.broadcast_object(value, SOURCE, trusted=trusted)


def all_gather(comm: un.Communicator, value: Any, trusted: bool) -> object:
    return comm.all_gather_object(value, trusted=trusted)


def gather(comm: un.Communicator, value: Any, trusted: bool) -> object:
    return comm.gather_object(value, 2, trusted=trusted)


def scatter(comm: un.Communicator, value: Any, trusted: bool) -> object:
    return comm.scatter_object([1, value, 3] if comm.rank == SOURCE else None, SOURCE, trusted=trusted)


def refused(
    comm: un.Communicator, call: Callable[[un.Communicator, Any, bool], object], trusted: bool
) -> tuple[str, float]:
    """Return the error of this rank for a lock on rank 1, and a sum after it."""
    said = "nothing"
    try:
        call(comm, threading.Lock() if comm.rank == SOURCE else 1, trusted)
    except TypeError as error:
        said = str(error)
    after = torch.ones(1)
    comm.all_reduce(after)
    return said, after.item()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
@pytest.mark.parametrize(
    ("call", "told"), [(broadcast, {0, 1, 2}), (all_gather, {0, 1, 2}), (gather, {1, 2}), (scatter, {0, 1, 2})]
)
def test_all_waiting_ranks_learn_the_error(
    call: Callable[[un.Communicator, Any, bool], object], told: set[int], backend: str, trusted: bool
) -> None:
    for rank, (said, after) in enumerate(pool(backend, 3).run(refused, call, trusted)):
        assert after == 3.0
        assert said.startswith(f"rank {SOURCE} has a value that cannot be sent: ") == (rank in told)
        assert ("lock" in said) == (rank in told)


def wrong_list(comm: un.Communicator, values: Any) -> tuple[str, float]:
    """Return the error of this rank for the values of rank 1, and a sum after it."""
    said = "nothing"
    try:
        comm.scatter_object(values if comm.rank == SOURCE else None, SOURCE)
    except ValueError as error:
        said = str(error)
    after = torch.ones(1)
    comm.all_reduce(after)
    return said, after.item()


@pytest.mark.parametrize("backend", ["thread", "gloo"])
@pytest.mark.parametrize(("values", "count"), [([1, 2], 2), ([1, 2, 3, 4], 4), (None, 0), (5, 0)])
def test_wrong_number_of_values_is_reported_to_all(values: Any, count: int, backend: str) -> None:
    said = f"objs on rank {SOURCE} must have one value for each of the 3 ranks, not {count}"
    assert pool(backend, 3).run(wrong_list, values) == [(said, 3.0)] * 3
