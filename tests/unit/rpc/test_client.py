"""Remote calls: values, names, many concurrent ones, long, late and cancelled ones."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import torch
from rpc_functions import BACKENDS, Point, add, bounce, echo, hold, later, on_rank_0, release
from waiting import wait_until

import unisono as un
from unisono.errors import AbortedError, CommTimeoutError
from unisono.testing import pool, run_ranks

rpc = un.rpc


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
    twice = torch.sparse_coo_tensor([[2, 2]], [1, 2], (4,), check_invariants=True)
    for sparse in (torch.eye(3).to_sparse(), twice, torch.zeros(2, 0).to_sparse()):
        back = rpc.rpc_sync("worker1", echo, (sparse,))
        assert back.is_coalesced() == sparse.is_coalesced()
        assert torch.equal(back.to_dense(), sparse.to_dense())
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
def test_values_round_trip(backend: str) -> None:
    assert pool(backend).run(on_rank_0(all_values), size=2)[0]


def order_of(tensor: torch.Tensor) -> list[int]:
    """The strides of dimensions that have any."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def strides() -> list[tuple[list[int], list[int]]]:
    """Strides of tensors that are sent, and of those that come back."""
    found = []
    for shape in [(2, 3, 4, 5), (7, 1, 30, 50)]:
        plain = torch.randn(shape)
        views = [plain.permute(3, 0, 2, 1), plain.to(memory_format=torch.channels_last), (plain > 0).transpose(0, 3)]
        for view in [*views, plain.to(torch.complex64).conj().transpose(1, 2), plain]:
            back = rpc.rpc_sync("worker1", echo, (view,))
            assert torch.equal(back, view)
            found.append((order_of(view), order_of(back)))
        with rpc.autograd.context() as context:
            leaf = plain.clone().requires_grad_()
            back = rpc.rpc_sync("worker1", echo, (leaf.permute(3, 0, 2, 1),))
            found.append((order_of(views[0]), order_of(back)))
            rpc.autograd.backward(context, [(back * views[0]).sum()])
            assert torch.equal(rpc.autograd.get_gradients(context)[leaf], plain)
    return found


def test_tensors_keep_their_memory_format() -> None:
    for sent, received in pool("shm").run(on_rank_0(strides), size=2)[0]:
        assert sent == received


def arguments_are_copies() -> list[float]:
    sent = torch.ones(50_000)
    future = rpc.rpc_async(1, add, (sent, 1))
    sent.zero_()
    own = torch.ones(3)
    mine = rpc.rpc_sync(0, echo, (own,))
    mine += 1
    return [future.wait()[0].item(), own[0].item()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sent_tensors_may_be_changed(backend: str) -> None:
    assert pool(backend).run(on_rank_0(arguments_are_copies), size=2)[0] == [2.0, 1.0]


def names() -> Any:
    info = rpc.get_worker_info("worker1")
    assert rpc.rpc_sync(info, add, (1,)) == rpc.rpc_sync(1, add, (1,)) == rpc.rpc_sync("worker1", add, (1,)) == 2
    assert rpc.rpc_sync("worker0", add, (1,)) == 2
    with pytest.raises(ValueError, match=r"unknown rank 'worker7'.*'worker0' \(0\), 'worker1' \(1\)"):
        rpc.rpc_sync("worker7", add, (1,))
    with pytest.raises(ValueError, match=r"unknown rank \[1\]"):
        rpc.rpc_sync([1], add)  # type: ignore[arg-type]  # wrong on purpose
    for timeout in (0, -1.0, float("nan"), float("inf")):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(ValueError, match=r"^timeout must be .*seconds"):
                call(1, add, (1,), timeout=timeout)
    with pytest.raises(ValueError, match="unknown rank 2"):
        rpc.rpc_async(2, add, (1,))
    with pytest.raises(TypeError, match=r"\[0\]\['a'\] is a .*lock"):
        rpc.rpc_sync(1, echo, ({"a": threading.Lock()},))
    return info.name, info.id, rpc.get_worker_info().name


def test_ranks_have_names_and_numbers() -> None:
    assert run_ranks(on_rank_0(names), 2)[0] == ("worker1", 1, "worker0")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_calls_exceed_the_workers(backend: str) -> None:
    program = on_rank_0(lambda: rpc.rpc_sync(1, bounce, (12,)), workers=2)
    assert pool(backend).run(program, size=2)[0] == 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_deferred_reply(backend: str) -> None:
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


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_ten_thousand_calls_in_flight(backend: str) -> None:
    assert pool(backend).run(on_rank_0(many), size=2)[0] == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_callback_makes_a_call_while_its_future_is_awaited(backend: str) -> None:
    def program() -> list[int]:
        found = []
        for number in range(50):
            future = rpc.rpc_async(1, add, (number,))
            chained = future.then(lambda ended: rpc.rpc_sync(1, add, (ended.value(),), timeout=20.0))
            # The thread that waits may be the one that runs the callback.
            future.wait()
            found.append(chained.wait())
        return found

    assert pool(backend).run(on_rank_0(program), size=2)[0] == list(range(2, 52))


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_functions_do_not_block_others(backend: str) -> None:
    def program() -> list[bool]:
        key = uuid.uuid4().hex
        long = [rpc.rpc_async(1, hold, (key,)) for _ in range(4)]
        assert rpc.rpc_sync(1, add, (1,)) == 2
        assert not any(f.done() for f in long)
        rpc.rpc_sync(1, release, (key,))
        return [f.wait() for f in long]

    assert pool(backend).run(on_rank_0(program), size=2)[0] == [True] * 4


def test_calls_have_timeouts() -> None:
    def program() -> Any:
        key = uuid.uuid4().hex
        with pytest.raises(CommTimeoutError, match=r"waited 0\.\d s for rank 1 to answer .*hold"):
            rpc.rpc_sync(1, hold, (key,), timeout=0.1)
        future = rpc.rpc_async(1, hold, (key,), timeout=0.1)
        with pytest.raises(TimeoutError):
            future.wait()
        with pytest.raises(TimeoutError):
            rpc.remote(1, hold, (key,)).to_here(timeout=0.05)
        patient = rpc.rpc_async(1, hold, (key,), timeout=1e9)
        rpc.rpc_sync(1, release, (key,), timeout=1e9)
        return patient.wait()

    assert run_ranks(on_rank_0(program), 2)[0] is True


def test_calls_can_be_cancelled() -> None:
    begun: list[str] = []
    go, seen = threading.Event(), threading.Event()

    @rpc.expose
    def work(name: str) -> bool:
        begun.append(name)
        go.wait(20.0)
        assert name != "first" or wait_until(rpc.cancelled)
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


def test_long_function_names_are_distinguished() -> None:
    def named(tag: str) -> Any:
        def function(value: str) -> str:
            return tag + value

        # As the names of functions within functions are.
        function.__qualname__ = "N" * 400 + tag
        return rpc.expose(function)

    functions = {tag: named(tag) for tag in "ab"}

    def program() -> None:
        for tag in "aabba":
            assert rpc.rpc_sync(1, functions[tag], ("!",)) == f"{tag}!"

    run_ranks(on_rank_0(program), 2)
