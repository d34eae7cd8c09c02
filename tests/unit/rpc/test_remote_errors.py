"""Errors of calls, and rejected calls."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from rpc_functions import BACKENDS, RAN, OddError, add, census, echo, not_a_future, on_rank_0, raises, unexposed
from waiting import wait_until

import unisono as un
from unisono.testing import pool, run_ranks

rpc = un.rpc


def errors() -> bool:
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync(1, raises, ("a key",))
    assert isinstance(caught.value, rpc.RemoteError)
    assert caught.value.args == ("a key",)
    text = str(caught.value)
    assert "On rank 1" in text
    assert "in raises" in text
    assert "KeyError: 'a key'" in text
    with pytest.raises(KeyError, match="in raises"):
        rpc.rpc_async(1, raises, ("a key",)).wait()
    with pytest.raises(rpc.RemoteError, match="SystemExit: 3"):
        rpc.rpc_sync(1, raises, ("exit",))
    with pytest.raises(TypeError, match=r"add\(\) missing 1 required"):
        rpc.rpc_sync(1, add)
    with pytest.raises(TypeError, match=r"must return a torch\.futures\.Future, not int"):
        rpc.rpc_sync(1, not_a_future)
    with pytest.raises(rpc.RemoteError, match="code 7"):
        rpc.rpc_sync(1, raises, ("odd",))
    assert rpc.rpc_sync(1, add, (1,)) == 2
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_raised_at_the_caller(backend: str) -> None:
    assert pool(backend).run(on_rank_0(errors), size=2)[0]


def test_error_keeps_its_class_and_fields() -> None:
    def program() -> Any:
        with pytest.raises(OddError) as caught:
            rpc.rpc_sync(1, raises, ("odd",))
        return caught.value.code, caught.value.rank, type(caught.value).__name__

    assert run_ranks(on_rank_0(program), 2)[0] == (7, 1, "OddError")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it says nothing")


@rpc.expose
def raises_oddly(kind: str) -> None:
    if kind == "mute":
        raise MuteError
    raise ExceptionGroup("many", [ValueError(1), KeyError(2)])


def test_unpicklable_errors_reach_the_caller() -> None:
    def program() -> None:
        with pytest.raises(MuteError) as caught:
            rpc.rpc_sync(1, raises_oddly, ("mute",), timeout=2.0)
        assert "its str() failed: RuntimeError" in str(caught.value)
        with pytest.raises(rpc.RemoteError, match=r"many \(2 sub-exceptions\)") as group:
            rpc.rpc_sync(1, raises_oddly, ("group",))
        assert "KeyError: 2" in str(group.value)

    # Nothing is left under way that would hold up the end.
    run_ranks(on_rank_0(program), 2)


def test_unexposed_function_is_not_called() -> None:
    def program() -> None:
        for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait(), lambda *a: rpc.remote(*a).to_here()):
            with pytest.raises(rpc.NotExposedError, match=r"unexposed is not exposed.*nothing ran.*rpc\.expose"):
                call(1, unexposed)
        with pytest.raises(rpc.NotExposedError, match=r"system is not exposed"):
            rpc.rpc_sync(1, __import__("os").system, ("true",))
        with pytest.raises(PermissionError):
            rpc.rpc_sync(1, echo, (unexposed,))

    run_ranks(on_rank_0(program), 2)
    assert not RAN


def test_rejected_argument_leaks_nothing() -> None:
    """The object that was to be made is known to be counted; references beside the function are let go."""

    def program() -> None:
        agent = rpc.context.current_agent()
        made = rpc.remote(1, echo, (unexposed,))
        with pytest.raises(rpc.NotExposedError):
            made.to_here()
        assert made.confirmed_by_owner()
        del made
        theirs = rpc.remote(1, echo, (5,))
        for rref in (rpc.RRef(4), theirs):
            with pytest.raises(rpc.NotExposedError):
                rpc.rpc_sync(1, echo, ([unexposed, rref],))
        del rref, theirs
        assert wait_until(lambda: agent.idle() and not agent.references.ledger and not agent.references.pins)
        assert wait_until(lambda: rpc.rpc_sync(1, census) == 0)

    run_ranks(on_rank_0(program), 2)
    assert not RAN


@rpc.expose
def gives_a_function() -> Any:
    HAVE_RUN.append(1)
    return unexposed


HAVE_RUN: list[int] = []


def test_function_argument_is_not_reported_as_called() -> None:
    def program() -> None:
        with pytest.raises(rpc.NotExposedError, match=r"rank 1 sent .*unexposed as a value.*on rank 0") as caught:
            rpc.rpc_sync(1, gives_a_function)
        assert "nothing ran" not in str(caught.value)
        assert HAVE_RUN
        with pytest.raises(rpc.NotExposedError, match=r"rank 0 sent .*unexposed as a value.*exposed on rank 1"):
            rpc.rpc_sync(1, echo, (unexposed,))

    run_ranks(on_rank_0(program), 2)
    assert not RAN


@pytest.mark.parametrize("args", [5, None, "ab", {"x": 1}, torch.ones(1)], ids=str)
def test_args_must_be_a_tuple(args: Any) -> None:
    def program() -> None:
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(TypeError, match=r"args must be a tuple of arguments, not a .*args=\(x,\)"):
                call(1, echo, args)
        assert rpc.rpc_sync(1, add, [1, 2]) == 3

    run_ranks(on_rank_0(program), 2)


def test_only_public_methods_of_exposed_classes_are_called() -> None:
    class Plain:
        def method(self) -> int:
            return RAN.append(1) or 1  # type: ignore[func-returns-value]  # None is what is wanted of it

        @rpc.expose
        def open(self) -> int:
            return 2

    class Guarded:
        def _secret(self) -> None:
            RAN.append(1)

    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm, expose=[Guarded, echo])
        if comm.rank == 0:
            guarded = rpc.remote(1, Guarded)
            with pytest.raises(rpc.NotExposedError, match="_secret"):
                guarded.rpc_sync()._secret()
            tensor = rpc.remote(1, echo, (torch.ones(2, 3),))
            assert tensor.rpc_sync().size() == torch.Size([2, 3])
        agent.shutdown()

    run_ranks(program, 2)
    agent_free = rpc.exported.ExportTable(trusted=False)
    with pytest.raises(rpc.NotExposedError, match=r"Plain\.method"):
        agent_free.method(Plain(), "method")
    assert agent_free.method(Plain(), "open")() == 2
    assert not RAN


def test_trusting_rank_accepts_pickle() -> None:
    secret = 5

    def program(comm: un.Communicator) -> Any:
        rpc.init(comm, trusted=True)
        result = None
        if comm.rank == 0:
            lock = type("Local", (), {"value": torch.ones(2)})
            result = [
                rpc.rpc_sync(1, lambda x: x + secret, (torch.ones(1),)).item(),
                rpc.rpc_sync(1, torch.add, (torch.ones(2), 2)).tolist(),
                rpc.rpc_sync(1, lambda kind: kind.value.sum().item(), (lock,)),
                rpc.rpc_sync(1, divmod, (7, 2)),
            ]
            module = torch.nn.Linear(2, 3)
            assert torch.equal(rpc.rpc_sync(1, getattr, (module, "weight")), module.weight)
        rpc.shutdown()
        return result

    assert run_ranks(program, 2)[0] == [6.0, [3.0, 3.0], 2.0, (3, 1)]


def test_untrusting_rank_rejects_pickle() -> None:
    def program(comm: un.Communicator) -> Any:
        rpc.init(comm, trusted=comm.rank == 0, expose=[echo])
        if comm.rank == 0:
            with pytest.raises(ValueError, match="pickled value was sent"):
                rpc.rpc_sync(1, echo, (type("Local", (), {}),))
            with pytest.raises(rpc.RemoteError, match=r"pickled value was sent|trusts its peers"):
                rpc.rpc_sync(1, lambda: RAN.append(1))
        rpc.shutdown()

    run_ranks(program, 2)
    assert not RAN


def test_trusting_rank_accepts_opaque_tensors() -> None:
    hollow = torch.empty(3, device="meta")

    def program() -> None:
        assert rpc.rpc_sync(1, echo, (hollow,)).shape == (3,)
        assert rpc.rpc_sync(1, echo, ({"s": [hollow, lambda: 1]},))["s"][0].is_meta

    run_ranks(on_rank_0(program, trusted=True), 2)

    def refused() -> None:
        # A RuntimeError, too, as of torch's RPC.
        with pytest.raises(RuntimeError, match=r"value\[0\] is a .*meta.* tensor") as caught:
            rpc.rpc_sync(1, echo, (hollow,))
        assert isinstance(caught.value, TypeError)

    run_ranks(on_rank_0(refused), 2)


def test_pickled_function_is_not_kept() -> None:
    def program() -> None:
        def passing() -> int:
            return 1

        known = weakref.ref(passing)
        assert rpc.rpc_sync(1, passing) == 1
        del passing
        assert wait_until(lambda: known() is None)

    run_ranks(on_rank_0(program, trusted=True), 2)


class ExitsWhenRead:
    """Its pickle raises SystemExit in the reader."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_pickle_that_exits_ends_no_thread() -> None:
    def program() -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match="cannot be read here"):
                rpc.rpc_async(1, ExitsWhenRead, timeout=5.0).wait()
        with pytest.raises(ValueError, match="cannot be read here"):
            rpc.rpc_sync(1, echo, (ExitsWhenRead(),))
        assert rpc.rpc_async(1, echo, (2,)).wait() == 2

    run_ranks(on_rank_0(program, trusted=True), 2)
