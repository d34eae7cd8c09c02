"""References to objects of other ranks: made, used, passed on, freed."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from reachable import reachable
from rpc_functions import census
from waiting import wait_until

import unisono as un
from unisono.rpc.refcount import RefCounts
from unisono.testing import pool, run_ranks

rpc = un.rpc
BACKENDS = ["thread", "shm", "gloo"]
KEPT: dict[int, Any] = {}


@rpc.expose
class Counter:
    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("counts from 0")
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def me(self) -> Counter:
        return self

    def __call__(self, number: int) -> int:
        return self.total * number


def counts_held() -> int:
    """Return the number of objects that the reference counts of this process consist of."""
    gc.collect()
    return sum(reachable(each) for each in gc.get_objects() if isinstance(each, RefCounts))


def test_failed_requests_leave_no_gap() -> None:
    """Numbers of objects behind a gap would be stored one by one."""

    def program(comm: un.Communicator) -> None:
        rpc.init(comm)
        if comm.rank == 0:
            held = []
            for _ in range(2):
                with pytest.raises(TypeError, match="lock"):
                    rpc.remote(1, Counter, (threading.Lock(),))
                assert [rpc.remote(1, Counter, (n,)).rpc_sync().add(1) for n in range(3)] == [1, 2, 3]
                assert wait_until(lambda: rpc.rpc_sync(1, census) == 0)
                held.append(counts_held())
            assert held[0] == held[1]
        rpc.shutdown()

    run_ranks(program, 2)


@pytest.mark.parametrize("how", ["remote", "rpc_async"])
def test_object_outlives_its_calls(how: str) -> None:
    def program(comm: un.Communicator) -> int | None:
        rpc.init(comm)
        found = None
        server, references = rpc.context.current_agent().server, rpc.context.current_agent().references
        run = server._run

        def after_it_was_dropped(call: Any, message: Any) -> Any:
            if call.target.endswith(b".add"):
                assert wait_until(lambda: len(references.ledger) == (how == "remote"))
            return run(call, message)

        if comm.rank == 1:
            server._run = after_it_was_dropped
        comm.barrier()
        if comm.rank == 0:
            rref = rpc.remote(1, Counter, (5,))
            made = getattr(rref, how)().add(2)
            del rref
            found = made.to_here() if how == "remote" else made.wait()
        rpc.shutdown()
        return found

    assert run_ranks(program, 2)[0] == 7


@rpc.expose
def keep(rref: Any) -> None:
    KEPT[rpc.get_worker_info().id] = rref


@rpc.expose
def let_go() -> None:
    KEPT.pop(rpc.get_worker_info().id, None)


@rpc.expose
def read(rref: Any) -> Any:
    return rref.rpc_sync().add(0)


@rpc.expose
def give_kept() -> Any:
    return KEPT[rpc.get_worker_info().id]


@rpc.expose
def hand_on(rref: Any, peer: int) -> Any:
    return rpc.rpc_sync(peer, hand_on, (rref, peer + 1)) if peer < 3 else rref


@rpc.expose
def is_mine(rref: Any) -> bool:
    return bool(rref.is_owner() and rref.local_value().total == rref.to_here().total)


def life(comm: un.Communicator) -> Any:
    rpc.init(comm, timeout=20.0)
    if comm.rank == 0:
        counter = rpc.remote("rank1", Counter, (10,))
        assert counter.rpc_sync().add(5) == 15
        assert counter.rpc_async().add(1).wait() == 16
        assert counter.remote().add(1).to_here() == 17
        assert counter.rpc_sync()(2) == 34
        assert counter.remote().me().rpc_sync().add(1) == 18
        assert counter.owner().id == 1
        assert counter.owner_name() == "rank1"
        assert not counter.is_owner()
        assert wait_until(counter.confirmed_by_owner)
        with pytest.raises(RuntimeError, match="only the owner, 'rank1'"):
            counter.local_value()
        with pytest.raises(TypeError, match="can be sent only as an argument"):
            __import__("pickle").dumps(counter)
        # The owner gets the object itself.
        assert rpc.rpc_sync(1, is_mine, (counter,))
        # A third rank uses it, one hands it on, and it comes back.
        assert rpc.rpc_sync(2, read, (counter,)) == 18
        back = rpc.rpc_sync(1, hand_on, (counter, 2))
        assert back.rpc_sync().add(1) == 19
        del counter, back
        assert wait_until(lambda: rpc.rpc_sync(1, census) == 0)
        assert wait_until(lambda: not rpc.context.current_agent().references.pins)
    rpc.shutdown(timeout=20.0)
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_reference_life_cycle(backend: str) -> None:
    assert all(pool(backend).run(life, size=3))


def kept_elsewhere(comm: un.Communicator) -> Any:
    rpc.init(comm, timeout=20.0)
    if comm.rank == 0:
        counter = rpc.remote(1, Counter, (3,))
        rpc.rpc_sync(2, keep, (counter,))
        own = rpc.RRef(torch.ones(3))
        rpc.rpc_sync(1, keep, (own,))
        assert own.is_owner()
        assert own.local_value() is own.to_here()
        del counter, own
        gc.collect()
        # They live on, since others hold them.
        assert rpc.rpc_sync(2, give_kept).rpc_sync().add(1) == 4
        assert rpc.rpc_sync(1, give_kept).to_here().tolist() == [1, 1, 1]
        assert rpc.rpc_sync(1, census) == census() == 1
        for rank in (1, 2):
            rpc.rpc_sync(rank, let_go)
        assert wait_until(lambda: census() == 0)
        assert wait_until(lambda: rpc.rpc_sync(1, census) == 0)
    rpc.shutdown(timeout=20.0)
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_holder_keeps_the_object(backend: str) -> None:
    assert all(pool(backend).run(kept_elsewhere, size=3))


def test_creation_error_is_raised_by_to_here() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm)
        if comm.rank == 0:
            broken = rpc.remote(1, Counter, (-1,))
            with pytest.raises(ValueError, match="counts from 0"):
                broken.to_here()
            with pytest.raises(ValueError, match="counts from 0"):
                broken.rpc_sync().add(1)
        rpc.shutdown()

    assert run_ranks(program, 2) == [None, None]


def test_last_local_reference_frees_immediately() -> None:
    with un.init() as comm:
        agent = rpc.init(comm)
        rref = rpc.RRef([1])
        assert len(agent.references.ledger) == 1
        del rref
        assert wait_until(lambda: len(agent.references.ledger) == 0)
        rpc.shutdown()


def test_reraised_error_does_not_grow() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm)
        broken = rpc.remote(0, Counter, (-1,))
        depths = []
        for _ in range(3):
            with pytest.raises(ValueError, match="counts from 0") as caught:
                broken.to_here()
            depths.append(len(caught.traceback))
        rpc.shutdown()
        assert depths[0] == depths[2]

    run_ranks(program, 1)
