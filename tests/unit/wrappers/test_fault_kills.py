"""Ranks that are killed on purpose, as threads and as processes."""

from __future__ import annotations

import signal
from collections.abc import Callable

import torch

import unisono as un
from unisono.core.transport import Transport
from unisono.errors import PeerLostError
from unisono.testing import Faulty, RankFaults, run_ranks
from unisono.wrappers.fault import KilledError


def killing(rank: int, at: int) -> Callable[[Transport], Transport]:
    return lambda inner: Faulty(inner, seed=0, on_ranks=RankFaults(kill_at=at, ranks=[rank]))


def posts(comm: un.Communicator) -> int:
    done = 0
    for _ in range(5):
        comm.sendrecv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)
        done += 1
    return done


def test_killed_thread_raises_its_own_error() -> None:
    other, killed = run_ranks(posts, 2, wrap=killing(1, at=3), on_failure="continue")
    assert isinstance(killed, KilledError)
    assert "post 3" in str(killed)
    assert isinstance(other, PeerLostError)
    assert other.peer == 1


def test_killed_process_ends_by_sigkill() -> None:
    other, killed = run_ranks(posts, 2, "gloo", wrap=killing(1, at=3), on_failure="continue")
    assert signal.SIGKILL.name in str(killed)
    assert isinstance(other, PeerLostError)
    assert other.peer == 1
