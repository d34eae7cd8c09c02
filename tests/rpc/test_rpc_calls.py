"""Calls: values, errors, names, times, threads; on every kind of mailbox."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import unisono as un
from unisono import wire
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError
from unisono.testing import pool, run_ranks

rpc = un.rpc
BACKENDS = ["thread", "shm", "gloo"]


@rpc.expose
@dataclasses.dataclass
class Point:
    x: int
    tensor: torch.Tensor


class Pair(NamedTuple):
    left: Any
    right: Any


class OddError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@rpc.expose
def echo(value: Any = None, **further: Any) -> Any:
    return (value, further) if further else value


@rpc.expose
def add(x: Any, y: Any = 1) -> Any:
    return x + y


@rpc.expose
def raises(error: str) -> None:
    if error == "odd":
        raise OddError(7)
    if error == "exit":
        raise SystemExit(3)
    {}[error]


@rpc.expose
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@rpc.expose
def bounce(depth: int) -> int:
    """Call back and forth, from inside of what was called."""
    if not depth:
        return 0
    peer = 1 - rpc.get_worker_info().id
    return int(rpc.rpc_sync(peer, bounce, (depth - 1,))) + 1


@rpc.expose
@rpc.async_execution
def later(value: Any, peer: int) -> torch.futures.Future[Any]:
    return rpc.rpc_async(peer, add, (value,)).then(lambda future: future.wait() * 2)


@rpc.expose
@rpc.async_execution
def not_a_future() -> int:
    return 3


def unexposed() -> None:
    RAN.append(1)


RAN: list[int] = []


def served(program: Callable[[un.Communicator], Any], **options: Any) -> Callable[[un.Communicator], Any]:
    """A program between init and shutdown."""

    def run(comm: un.Communicator) -> Any:
        # In a pool the class has come by value.
        wire.register(Point)
        rpc.init(comm, f"worker{comm.rank}", **{"timeout": 20.0, **options})
        result = program(comm)
        rpc.shutdown(timeout=20.0)
        return result

    return run


def on_rank_0(program: Callable[[], Any], **options: Any) -> Callable[[un.Communicator], Any]:
    return served(lambda comm: program() if comm.rank == 0 else None, **options)


def all_values() -> bool:
    strided = torch.arange(30_000.0).view(100, 300)[::3, 1::2]
    tensors = [
        torch.tensor(3),
        torch.zeros(0, 4),
        strided,
        torch.arange(100_000, dtype=torch.int16),
        torch.randn(70_000).bfloat16(),
        torch.randn(5_000, dtype=torch.complex64).conj(),
        torch.arange(20_000) % 3 == 0,
    ]
    for tensor in tensors:
        back = rpc.rpc_sync("worker1", echo, (tensor,))
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
    plain = [None, True, 2**70, 1.5, 2j, "text", b"bytes" * 2000, [1, [2]], {"a": (1, {2})}, range(3)]
    assert rpc.rpc_sync("worker1", echo, (plain,)) == plain
    assert rpc.rpc_sync("worker1", echo, ("x" * 600_000,)) == "x" * 600_000
    point = rpc.rpc_sync(1, echo, (Point(3, tensors[3]),))
    assert isinstance(point, Point)
    assert torch.equal(point.tensor, tensors[3])
    assert rpc.rpc_sync(1, echo, (1,), {"more": 2}) == (1, {"more": 2})
    assert rpc.rpc_sync(1, Point, (1,), {"tensor": tensors[0]}).x == 1
    assert rpc.rpc_sync(1, echo, (add,)) is add
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_arrive_as_they_were(backend: str) -> None:
    assert pool(backend).run(on_rank_0(all_values), size=2)[0]


def arguments_are_copies() -> list[float]:
    sent = torch.ones(50_000)
    future = rpc.rpc_async(1, add, (sent, 1))
    sent.zero_()
    own = torch.ones(3)
    mine = rpc.rpc_sync(0, echo, (own,))
    mine += 1
    return [future.wait()[0].item(), own[0].item()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_sent_may_be_changed(backend: str) -> None:
    assert pool(backend).run(on_rank_0(arguments_are_copies), size=2)[0] == [2.0, 1.0]


def names() -> Any:
    info = rpc.get_worker_info("worker1")
    assert rpc.rpc_sync(info, add, (1,)) == rpc.rpc_sync(1, add, (1,)) == rpc.rpc_sync("worker1", add, (1,)) == 2
    assert rpc.rpc_sync("worker0", add, (1,)) == 2
    with pytest.raises(ValueError, match=r"no rank 'worker7'.*'worker0' \(0\), 'worker1' \(1\)"):
        rpc.rpc_sync("worker7", add, (1,))
    with pytest.raises(ValueError, match="no rank 2"):
        rpc.rpc_async(2, add, (1,))
    with pytest.raises(TypeError, match=r"\[0\]\['a'\] is a .*lock"):
        rpc.rpc_sync(1, echo, ({"a": threading.Lock()},))
    return info.name, info.id, rpc.get_worker_info().name


def test_ranks_have_names_and_numbers() -> None:
    assert run_ranks(on_rank_0(names), 2)[0] == ("worker1", 1, "worker0")


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


def test_an_error_has_its_own_class_and_fields() -> None:
    def program() -> Any:
        with pytest.raises(OddError) as caught:
            rpc.rpc_sync(1, raises, ("odd",))
        return caught.value.code, caught.value.rank, type(caught.value).__name__

    assert run_ranks(on_rank_0(program), 2)[0] == (7, 1, "OddError")


def test_what_is_not_exposed_is_not_called() -> None:
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


def test_only_public_methods_of_exposed_classes_are_called() -> None:
    class Plain:
        def method(self) -> int:
            return RAN.append(1) or 1  # type: ignore[func-returns-value]  # None is what is wanted of it

        @rpc.expose
        def open(self) -> int:
            return 2

    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm, expose=[Point, echo])
        if comm.rank == 0:
            point = rpc.remote(1, Point, (5, torch.ones(2)))
            with pytest.raises(rpc.NotExposedError, match="_secret"):
                point.rpc_sync()._secret()
            tensor = rpc.remote(1, echo, (torch.ones(2, 3),))
            assert tensor.rpc_sync().size() == torch.Size([2, 3])
        agent.shutdown()

    run_ranks(program, 2)
    agent_free = rpc.exposing.Exposed(trusted=False)
    with pytest.raises(rpc.NotExposedError, match=r"Plain\.method"):
        agent_free.method(Plain(), "method")
    assert agent_free.method(Plain(), "open")() == 2
    assert not RAN


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_go_back_and_forth_deeper_than_there_are_workers(backend: str) -> None:
    program = on_rank_0(lambda: rpc.rpc_sync(1, bounce, (12,)), workers=2)
    assert pool(backend).run(program, size=2)[0] == 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_may_answer_later(backend: str) -> None:
    def program() -> list[int]:
        return [f.wait() for f in [rpc.rpc_async(1, later, (i, 0)) for i in range(50)]]

    assert pool(backend).run(on_rank_0(program), size=2)[0] == [2 * (i + 1) for i in range(50)]


def many() -> list[Any]:
    futures = [rpc.rpc_async(1, add, (i,)) for i in range(10_000)]
    threads, results = [], list[int]()
    for number in range(4):
        # One line is what is tested.
        call = lambda number=number: results.extend(rpc.rpc_sync(1, add, (number,)) for _ in range(25))  # noqa: E731
        threads.append(threading.Thread(target=call))
        threads[-1].start()
    for thread in threads:
        thread.join()
    values = torch.futures.wait_all(futures)
    return [values == list(range(1, 10_001)), sorted(results) == sorted([1, 2, 3, 4] * 25)]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ten_thousand_calls_in_flight(backend: str) -> None:
    assert pool(backend).run(on_rank_0(many), size=2)[0] == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_functions_hold_nothing_up(backend: str) -> None:
    def program() -> bool:
        long = [rpc.rpc_async(1, nap, (1.0,)) for _ in range(4)]
        started = time.monotonic()
        assert rpc.rpc_sync(1, add, (1,)) == 2
        quick = time.monotonic() - started
        return [f.wait() for f in long] == [1.0] * 4 and quick < 0.9

    assert pool(backend).run(on_rank_0(program), size=2)[0]


def test_calls_have_times() -> None:
    def program() -> Any:
        with pytest.raises(CommTimeoutError, match=r"waited 0\.\d s for rank 1 to answer .*nap"):
            rpc.rpc_sync(1, nap, (0.5,), timeout=0.1)
        future = rpc.rpc_async(1, nap, (0.5,), timeout=0.1)
        with pytest.raises(TimeoutError):
            future.wait()
        with pytest.raises(TimeoutError):
            rpc.remote(1, nap, (0.5,)).to_here(timeout=0.05)
        return rpc.rpc_sync(1, nap, (0.2,), timeout=float("inf"))

    assert run_ranks(on_rank_0(program), 2)[0] == 0.2


def test_calls_can_be_cancelled() -> None:
    begun: list[str] = []
    go, seen = threading.Event(), threading.Event()

    @rpc.expose
    def work(name: str) -> bool:
        begun.append(name)
        go.wait(20.0)
        while name == "first" and not rpc.cancelled():
            time.sleep(0.001)
        seen.set()
        return True

    def program(comm: un.Communicator) -> Any:
        rpc.init(comm, workers=1, expose=[work])
        if comm.rank == 0:
            # The first goes to the receiving thread, the second finds it slow and takes the only worker.
            futures = [rpc.rpc_async(1, work, (name,)) for name in ("first", "second", "third")]
            ends = [futures[0].cancel(), futures[2].cancel(), futures[2].cancel()]
            go.set()
            with pytest.raises(AbortedError, match="cancelled"):
                futures[0].wait()
            assert futures[1].wait()
            assert seen.wait(20.0)
            rpc.shutdown()
            return ends
        return rpc.shutdown()

    assert run_ranks(program, 2)[0] == [True, True, False]
    assert "second" in begun


@rpc.expose
def from_a_thread() -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(rpc.rpc_sync(0, add, (41,))))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_threads_of_a_process_find_its_agent(backend: str) -> None:
    program = on_rank_0(lambda: rpc.rpc_sync(1, from_a_thread))
    assert pool(backend).run(program, size=2)[0] == 42


def test_an_agent_starts_threads_of_its_rank() -> None:
    def program(comm: un.Communicator) -> Any:
        agent, found = rpc.init(comm), list[Any]()
        agent.thread(lambda number: found.append(rpc.get_worker_info().id + number), 10).join()
        rpc.shutdown()
        return found

    assert run_ranks(program, 2) == [[10], [11]]


def test_a_thread_that_belongs_to_no_rank_is_told_so() -> None:
    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm)
        comm.barrier()
        found: list[Any] = []

        def foreign() -> None:
            try:
                rpc.get_worker_info()
            except CommError as error:
                found.append(str(error))
            found.append(agent.rpc_sync(1 - comm.rank, add, (1,)))

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        rpc.shutdown()
        return found

    for text, answer in run_ranks(program, 2):
        assert "its method thread()" in text
        assert answer == 2
    with pytest.raises(CommError, match=r"rpc\.init"):
        rpc.rpc_sync(0, add)


def test_who_trusts_takes_anything() -> None:
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


def test_who_does_not_trust_takes_no_pickle() -> None:
    def program(comm: un.Communicator) -> Any:
        rpc.init(comm, trusted=comm.rank == 0, expose=[echo])
        if comm.rank == 0:
            with pytest.raises(ValueError, match="pickled value came"):
                rpc.rpc_sync(1, echo, (type("Local", (), {}),))
            with pytest.raises(rpc.RemoteError, match=r"pickled value came|trusts its peers"):
                rpc.rpc_sync(1, lambda: RAN.append(1))
        rpc.shutdown()

    run_ranks(program, 2)
    assert not RAN


def test_two_agents_in_one_process() -> None:
    def program(comm: un.Communicator) -> Any:
        first = rpc.init(comm, f"first{comm.rank}")
        half = comm.split(comm.rank % 2)
        second = rpc.init(half, f"second{comm.rank}")
        answers = first.rpc_sync((comm.rank + 1) % 4, add, (1,)), second.rpc_sync(1 - half.rank, add, (2,))
        current = rpc.get_worker_info().name
        second.shutdown()
        first.shutdown()
        with pytest.raises(ClosedError, match="shut down"):
            first.rpc_sync(0, add, (1,))
        return *answers, current

    assert run_ranks(program, 4) == [(2, 3, f"second{rank}") for rank in range(4)]


def test_names_are_different() -> None:
    def program(comm: un.Communicator) -> Any:
        with pytest.raises(ValueError, match="several ranks gave the name 'same'"):
            rpc.init(comm, "same")
        rpc.shutdown()
        rpc.init(comm, f"other{comm.rank}")
        rpc.shutdown()
        rpc.shutdown()
        return True

    assert all(run_ranks(program, 2))


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": 3}, {"timeout": 0}, {"workers": 0}])
def test_wrong_arguments_of_init(wrong: dict[str, Any]) -> None:
    with un.init() as comm, pytest.raises(ValueError, match=next(iter(wrong))):
        rpc.init(comm, **wrong)


def test_what_cannot_be_exposed() -> None:
    with pytest.raises(TypeError, match="not a int"):
        rpc.expose(3)
    with pytest.raises(TypeError, match="no name"):
        rpc.expose([].append)


def test_a_world_of_one() -> None:
    with un.init() as comm:
        rpc.init(comm)
        assert rpc.rpc_sync(0, add, (1,)) == 2
        assert rpc.remote("rank0", add, (1,)).to_here() == 2
        rpc.shutdown()
