"""`init` on ranks that differ in their arguments: all of them learn it at once, though only some could raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import run_concurrently

import unisono as un
from unisono.errors import CommError, MismatchError, PeerLostError

pytestmark = pytest.mark.usefixtures("nobody_started_us")


@pytest.fixture
def start(port: int) -> Iterator[Callable[..., list[Any]]]:
    """Start ranks, each a thread, with these options of `init`; return their errors."""
    found: list[Any] = []

    def run(*options: dict[str, Any]) -> list[Any]:
        def rank(number: int) -> un.Communicator:
            place = {"init_method": f"tcp://127.0.0.1:{port}", "rank": number, "world_size": len(options)}
            return un.init(**{"timeout": 60.0, **place, **options[number]})

        found.extend(run_concurrently(*(lambda number=number: rank(number) for number in range(len(options)))))
        return found

    yield run
    for end in found:
        if isinstance(end, un.Communicator):
            end.close()


@pytest.mark.parametrize("backends", [("tcp", "gloo", "tcp"), ("auto", "shm", "tcp"), ("shm+tcp", "auto")])
def test_backends_that_differ(start: Callable[..., list[Any]], backends: tuple[str, ...]) -> None:
    ends = start(*({"backend": name} for name in backends))
    chosen = ["shm" if name == "auto" else name for name in backends]
    quoted = "; ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(chosen))
    for rank, end in enumerate(ends):
        assert isinstance(end, MismatchError)
        assert f"rank {rank} of {len(ends)}, init: ranks use different backends ({quoted})" in str(end)


def test_a_variable_that_differs(start: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_BACKEND", "tcp")
    assert all("rank 1: 'shm'" in str(end) for end in start({}, {"backend": "shm"}))


def test_auto_and_what_it_chooses_are_the_same(start: Callable[..., list[Any]]) -> None:
    assert [end.backend for end in start({"backend": "shm"}, {"backend": "auto"})] == ["shm", "shm"]


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_refuses_tells_the_others_why(start: Callable[..., list[Any]], refusing: int) -> None:
    ends = start(*({"interface": "ib7"} if rank == refusing else {} for rank in range(3)))
    assert "this host has no network interface 'ib7'" in str(ends[refusing])
    for rank, end in enumerate(ends):
        if rank != refusing:
            assert isinstance(end, PeerLostError)
            assert f"rank {refusing} failed in init: ValueError: this host has no network interface" in str(end)
            assert end.peer == refusing


def test_check_and_deterministic_that_differ(start: Callable[..., list[Any]]) -> None:
    ends = start({"deterministic": True}, {"check": "off"})
    assert all(isinstance(end, CommError) and "they must be equal" in str(end) for end in ends)
