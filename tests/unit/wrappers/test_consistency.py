"""check="full": shapes, buffers that change before `wait`, and results that are not what was sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as un
from unisono.core.call import Call
from unisono.core.transport import Transport
from unisono.core.types import PointToPoint, Work
from unisono.core.work import ChainedWork
from unisono.errors import CommError, CorruptedError, MismatchError
from unisono.testing import run_ranks
from unisono.testing.pools import pool
from unisono.wrappers.base import Wrapper


class Flips(Wrapper):
    """Changes the last byte of what rank 1 has received, or holds as a result."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.native = inner.native

    def wrap_child(self, inner: Transport) -> Flips:
        return Flips(inner)

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        def flip() -> None:
            if self.rank == 1 and call.outputs:
                call.outputs[-1].view(torch.uint8)[-1] ^= 64

        return ChainedWork(super().run(call, over), flip)


def lists(comm: Any, like: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(like) for _ in range(comm.size)]


CALLS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "all_reduce": lambda comm, t: comm.all_reduce(t),
    "broadcast": lambda comm, t: comm.broadcast(t, 0),
    "all_gather": lambda comm, t: comm.all_gather(lists(comm, t), t),
    "gather": lambda comm, t: comm.gather(t, lists(comm, t) if comm.rank == 1 else None, 1),
    "scatter": lambda comm, t: comm.scatter(t, lists(comm, t) if comm.rank == 0 else None, 0),
    "all_to_all": lambda comm, t: comm.all_to_all(lists(comm, t), [t] * comm.size),
}


@pytest.mark.parametrize("name", CALLS)
def test_flipped_bit_is_found_on_all_ranks(name: str) -> None:
    def program(comm: Any) -> str:
        with pytest.raises(CorruptedError, match="rank 1") as caught:
            CALLS[name](comm, torch.arange(6.0) + comm.rank)
        return str(caught.value)

    assert all(name in text for text in run_ranks(program, 3, "thread", check="full", wrap=_outside))


def _outside(inner: Transport) -> Transport:
    return Flips(inner)


def test_flipped_bit_of_a_message_is_found() -> None:
    class Spoils(Flips):
        def post(self, batch: Any) -> Work:
            work = self.inner.post(batch)
            if self.rank == 1:
                work.wait(60.0)
                batch[0].tensor.view(torch.uint8)[0] ^= 1
            return work

    def program(comm: Any) -> None:
        if comm.rank == 0:
            comm.send(torch.ones(4), 1)
        else:
            with pytest.raises(CorruptedError, match=r"a message from rank 0 .tag 0. holds other bytes than were sent"):
                comm.recv(torch.zeros(4), 0)

    def later(comm: Any) -> None:
        if comm.rank == 0:
            with contextlib.suppress(CommError):
                comm.send(torch.ones(4), 1)
            return
        received = torch.zeros(4)
        work = comm.irecv(received, 0)
        assert work.is_completed()
        assert isinstance(work.exception(), CorruptedError)
        for _ in range(2):
            with pytest.raises(CorruptedError):
                work.wait()
        assert received.tolist() == [0.0] * 4

    run_ranks(program, 2, "thread", check="full", wrap=Spoils)
    run_ranks(later, 2, "thread", check="full", wrap=Spoils)


def nothing_wrong(comm: Any) -> list[float]:
    tensor = torch.arange(4.0).view(2, 2).t() + comm.rank
    comm.all_reduce(tensor, "avg")
    comm.broadcast(tensor, 1)
    whole = torch.zeros(4 * comm.size)
    comm.all_gather_single(whole, tensor.contiguous().view(-1))
    comm.reduce_scatter_single(whole[:4], whole.clone())
    comm.reduce(tensor, 0, "max")
    works = [comm.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    comm.sendrecv(whole[:2], (comm.rank + 1) % comm.size, whole[2:4], (comm.rank - 1) % comm.size)
    comm.barrier()
    assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    return tensor.reshape(-1).tolist()


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_correct_calls_pass(backend: str) -> None:
    full = pool(backend, 2, check="full").run(nothing_wrong)
    assert full == pool(backend, 2).run(nothing_wrong)


def test_output_may_overlap_the_input_of_a_reduction() -> None:
    def program(comm: Any) -> list[float]:
        whole = torch.arange(4.0)
        comm.reduce_scatter_single(whole[:2], whole)
        parts = list(torch.arange(4.0).split(2))
        comm.reduce_scatter(parts[0], parts)
        return [*whole.tolist(), *parts[0].tolist()]

    assert run_ranks(program, 2, "thread", check="full") == [
        [0.0, 2.0, 2.0, 3.0, 0.0, 2.0],
        [4.0, 6.0, 2.0, 3.0, 4.0, 6.0],
    ]


CHANGED: dict[str, Callable[[Any, torch.Tensor], Work]] = {
    "all_reduce": lambda comm, t: comm.all_reduce(t, async_op=True),
    "reduce": lambda comm, t: comm.reduce(t, 0, async_op=True),
    "broadcast": lambda comm, t: comm.broadcast(t, 1, async_op=True),
    "reduce_scatter": lambda comm, t: comm.reduce_scatter(torch.zeros(2), [t, torch.ones(2)], async_op=True),
    "all_gather": lambda comm, t: comm.all_gather(lists(comm, t), t, async_op=True),
    "isend": lambda comm, t: comm.isend(t, 0) if comm.rank == 1 else comm.irecv(t, 1),
}


@pytest.mark.parametrize("name", CHANGED)
def test_buffer_changed_before_wait_is_found(name: str) -> None:
    changed = threading.Event()

    def program(comm: Any) -> str:
        tensor = torch.ones(2)
        # It is not over before both have come.
        assert comm.rank == 1 or changed.wait(60.0)
        work = CHANGED[name](comm, tensor)
        if comm.rank == 1:
            tensor[0] = 5.0
            changed.set()
            with pytest.raises(
                MismatchError, match=r"test_consistency.py:\d+ .* was changed between the call and the end"
            ):
                work.wait()
        else:
            # Its own part may be right, or may not be there: it gets the error of the other part.
            with contextlib.suppress(CommError):
                work.wait()
                comm.barrier()
        return "done"

    assert run_ranks(program, 2, "thread", check="full") == ["done"] * 2


@pytest.mark.parametrize("how", [{}, {"scale": 1.0}])
def test_change_of_a_queued_buffer_reaches_no_other_rank(how: dict[str, Any]) -> None:
    changed = threading.Event()
    sums = []

    class Notes(Flips):
        """Notes the sums that rank 0 gets; rank 1 fails only after that, when the two have compared them."""

        def run(self, call: Call, over: PointToPoint | None = None) -> Work:
            def note() -> None:
                if self.rank == 0 and call.outputs:
                    sums.append(call.outputs[0].tolist())

            return ChainedWork(self.inner.run(call, over), note)

    def program(comm: Any) -> None:
        assert comm.rank == 1 or changed.wait(60.0)
        tensor = torch.ones(2)
        works = [comm.barrier(async_op=True), comm.all_reduce(tensor, **how, async_op=True)]
        if comm.rank == 1:
            # The barrier waits for rank 0, so the sum has not begun.
            tensor.fill_(100.0)
            changed.set()
            with pytest.raises(MismatchError, match="was changed between the call and the end"):
                works[1].wait()
        else:
            # This rank may get the error of the other one before its call ends.
            with contextlib.suppress(CommError):
                works[1].wait()

    run_ranks(program, 2, "thread", check="full", wrap=Notes)
    assert sums == [[2.0, 2.0]]


def test_check_mode_must_agree() -> None:
    with pytest.raises(ValueError, match="check must be"):
        un.init(check="most")  # type: ignore[arg-type]  # wrong or narrower on purpose


@pytest.mark.parametrize(
    ("ops", "algorithms", "text"),
    [
        (("sum", "max"), ("ring", "recursive_doubling"), "ranks differ in op: "),
        (("sum", "sum"), ("ring", "recursive_doubling"), "ranks differ in algorithm: "),
    ],
)
def test_algorithm_is_named_where_nothing_else_differs(
    ops: tuple[str, str], algorithms: tuple[str, str], text: str
) -> None:
    """It is chosen by the operation otherwise."""

    def program(comm: un.Communicator) -> None:
        comm.all_reduce(torch.ones(3), ops[comm.rank], algorithm=algorithms[comm.rank])

    with pytest.raises(un.errors.MismatchError, match=text):
        un.launch(program, 2, "thread")
