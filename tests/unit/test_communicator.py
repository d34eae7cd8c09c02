"""Groups, threads, life and death of a communicator."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import pytest
import torch

import unisono as un
from unisono.core.types import Recv, Send
from unisono.testing import pool


def on_threads(fn: object, size: int = 2, **options: object) -> list[object]:
    return un.launch(fn, size, "thread", timeout=60.0, **options)


def test_single_rank_needs_no_launcher() -> None:
    with un.init() as comm:
        t = torch.ones(3)
        comm.all_reduce(t)
        assert (comm.rank, comm.size, t.tolist(), comm.hosts) == (0, 1, [1.0] * 3, ((0,),))
        assert comm.all_gather_object("x") == ["x"]
    with pytest.raises(un.errors.ClosedError, match="closed"):
        comm.barrier()
    comm.close()


def test_split_orders_by_key_and_nests() -> None:
    def program(comm: un.Communicator) -> object:
        back = comm.split(color=0, key=-comm.rank)
        half = back.split(color=back.rank % 2)
        t = torch.tensor([comm.rank])
        half.all_reduce(t)
        return back.rank, half.size, t.item()

    assert on_threads(program, 4) == [(3, 2, 2), (2, 2, 4), (1, 2, 2), (0, 2, 4)]


def test_split_without_color_returns_none() -> None:
    def program(comm: un.Communicator) -> object:
        part = comm.split(None if comm.rank == 1 else 5)
        return part and (part.rank, part.size)

    assert on_threads(program, 3) == [(0, 2), None, (1, 2)]


def test_colors_true_and_1_are_equal() -> None:
    def program(comm: un.Communicator) -> object:
        part = comm.split(True if comm.rank == 0 else 1)
        return part.rank, part.size

    assert on_threads(program) == [(0, 2), (1, 2)]


def test_ranks_and_messages_may_be_generators() -> None:
    def program(comm: un.Communicator) -> object:
        twin, other, t = comm.subgroup(r for r in (1, 0)), 1 - comm.rank, torch.zeros(1)
        for work in comm.batch_isend_irecv(m for m in (Recv(t, other), Send(torch.ones(1), other))):
            work.wait()
        return twin.rank, t.item()

    assert on_threads(program) == [(1, 1.0), (0, 1.0)]


def test_no_messages_are_no_works() -> None:
    assert on_threads(lambda comm: comm.batch_isend_irecv([])) == [[], []]


def test_batch_names_the_types_that_it_takes() -> None:
    def program(comm: un.Communicator) -> str:
        with pytest.raises(TypeError) as caught:
            comm.batch_isend_irecv([(torch.ones(1), 1 - comm.rank)])
        return str(caught.value)

    assert on_threads(program)[0].startswith("batch_isend_irecv takes unisono.Send and unisono.Recv, not tuple.")


def test_partial_overlap_of_own_part_is_rejected() -> None:
    def program(comm: un.Communicator) -> list[float]:
        b = torch.arange(10.0)
        with pytest.raises(ValueError, match=rf"output\[{comm.rank}\] and the input share memory"):
            comm.all_gather_single(b[:4], b[2 * comm.rank + 1 : 2 * comm.rank + 3])
        comm.all_gather_single(b[:4], b[2 * comm.rank : 2 * comm.rank + 2])
        if comm.rank == 0:
            with pytest.raises(ValueError, match=r"gather_list\[0\] and the input share memory"):
                comm.gather(b[2:4], [b[1:3], b[5:7]])
            with pytest.raises(ValueError, match=r"scatter_list\[0\] and the tensor share memory"):
                comm.scatter(b[2:4], [b[1:3], b[5:7]])
        comm.barrier()
        return b[:4].tolist()

    assert on_threads(program) == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_non_tensor_argument_is_named() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor, .* not NoneType"):
            comm.sendrecv(torch.ones(1), 1 - comm.rank, None, 1 - comm.rank)
        with pytest.raises(TypeError, match=r"output must be a torch\.Tensor, .* not NoneType"):
            comm.reduce_scatter_single(None, torch.ones(2))

    on_threads(program)


def test_subgroup_keeps_the_order_given() -> None:
    def program(comm: un.Communicator) -> object:
        part = comm.subgroup([2, 0])
        return part and part.rank

    assert on_threads(program, 3) == [1, None, 0]


def test_subgroup_lists_must_agree() -> None:
    with pytest.raises(un.errors.MismatchError, match=r"'the ranks of a subgroup', at \[0\]: rank 0: 0; rank 1: 1"):
        on_threads(lambda comm: comm.subgroup([comm.rank]))


@pytest.mark.parametrize("ranks", [[0, 0], [2], [-1], []])
def test_subgroup_requires_distinct_existing_ranks(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="rank"):
        on_threads(lambda comm: comm.subgroup(ranks))


def test_other_thread_is_rejected_until_release_thread() -> None:
    def program(comm: un.Communicator) -> tuple[str, float]:
        comm.barrier()
        errors: list[BaseException] = []
        t = torch.ones(1)

        def other() -> None:
            try:
                comm.all_reduce(t)
            except un.CommError as error:
                errors.append(error)

        for _ in range(2):
            thread = threading.Thread(target=other, name="another")
            thread.start()
            thread.join()
            comm.release_thread() if len(errors) == 1 and t.item() == 1 else None
        return str(errors[0]), t.item()

    for message, total in on_threads(program):
        assert "belongs to another thread than 'another'" in message
        assert total == 2


def test_dup_is_independent() -> None:
    def program(comm: un.Communicator) -> list[float]:
        twin = comm.dup()
        a, b = torch.ones(1), torch.ones(1) * 10
        first, second = (comm, twin) if comm.rank == 0 else (twin, comm)
        works = [first.all_reduce(a if first is comm else b, async_op=True)]
        works.append(second.all_reduce(b if first is comm else a, async_op=True))
        for work in works:
            work.wait()
        return [a.item(), b.item()]

    assert on_threads(program) == [[2.0, 20.0]] * 2


def test_abort_reaches_every_rank() -> None:
    def program(comm: un.Communicator) -> str:
        if comm.rank == 0:
            comm.abort("enough")
        with pytest.raises(un.errors.AbortedError, match="rank 0 aborted the communicator: enough") as caught:
            comm.barrier()
        return str(caught.value)

    assert [text.split(",")[0] for text in on_threads(program, 3)] == [f"rank {r} of 3" for r in range(3)]


def test_asynchronous_calls_keep_their_order_and_overlap_with_blocking_ones() -> None:
    def program(comm: un.Communicator) -> list[float]:
        tensors = [torch.full((1000,), float(i)) for i in range(8)]
        works = [comm.all_reduce(t, async_op=True, algorithm="ring") for t in tensors[:-1]]
        comm.all_reduce(tensors[-1])
        futures = [work.get_future() for work in works]
        torch.futures.wait_all(futures)
        assert all(work.is_completed() and work.exception() is None for work in works)
        return [t[0].item() for t in tensors]

    assert on_threads(program, 3) == [[3.0 * i for i in range(8)]] * 3


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_late_asynchronous_call_names_the_missing_rank(backend: str) -> None:
    def program(comm: un.Communicator) -> tuple[str, int | None]:
        other = comm.dup()
        if comm.rank == 1:
            comm.recv(torch.zeros(1), 0)
            return "", None
        work = other.all_reduce(torch.ones(4), async_op=True, timeout=0.5)
        with pytest.raises(un.errors.CommTimeoutError) as caught:
            work.wait()
        comm.send(torch.zeros(1), 1)
        return str(caught.value), caught.value.peer

    said, peer = un.launch(program, 2, backend, timeout=20)[0]
    assert (peer, "rank 1" in said) == (1, True)


def test_failed_asynchronous_call_raises_at_wait_and_breaks_the_communicator() -> None:
    def program(comm: un.Communicator) -> str:
        work = comm.all_reduce(torch.ones(comm.rank + 1), async_op=True)
        with pytest.raises(un.errors.MismatchError, match="ranks differ in counts"):
            work.wait()
        assert isinstance(work.exception(), un.errors.MismatchError)
        with pytest.raises(un.errors.MismatchError):
            comm.barrier()
        return "told"

    assert on_threads(program) == ["told"] * 2


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_receive_pending_at_close_is_an_error(backend: str) -> None:
    def program(comm: un.Communicator) -> list[str]:
        part = comm.dup()
        works = [part.irecv(torch.zeros(size), 1 - comm.rank, tag) for tag, size in enumerate((0, 3, 5000))]
        part.close()
        said = []
        for work in works:
            with pytest.raises(un.CommError) as caught:
                work.wait(60.0)
            said.append(type(caught.value).__name__)
            assert work.exception() is not None
        return said

    for said in pool(backend, 2).run(program):
        assert set(said) <= {"ClosedError", "PeerLostError"}


def test_errors_survive_pickling() -> None:
    error = un.errors.CommTimeoutError("late", rank=1, size=2, operation="recv", peer=0, nbytes=4, waited_s=0.5)
    error.add_note("while it waited")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert isinstance(again, TimeoutError)


def test_from_group_leaves_the_group_to_its_owner(tmp_path: object) -> None:
    def program(outer: un.Communicator, path: str) -> list[float]:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{path}", rank=outer.rank, world_size=outer.size)
        t = torch.ones(2) * (outer.rank + 1)
        with un.Communicator.from_group() as comm:
            comm.all_reduce(t)
            comm.all_reduce(t, algorithm="ring")
            half = comm.split(comm.rank % 2)
            half.all_reduce(t)
            half.close()
        dist.all_reduce(t)
        dist.destroy_process_group()
        return t.tolist()

    assert un.launch(program, 3, "gloo", args=(str(tmp_path / "store"),)) == [[90.0, 90.0]] * 3


def test_from_group_names_unsupported_backends_and_missing_ranks(tmp_path: object) -> None:
    def program(outer: un.Communicator, path: str) -> list[str]:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{path}", rank=outer.rank, world_size=outer.size)
        first = dist.new_group([0])
        said = []

        def refused(group: object, **how: float) -> None:
            with pytest.raises((TypeError, ValueError, un.CommError)) as caught:
                un.Communicator.from_group(group, **how)
            said.append(f"{type(caught.value).__name__}: {caught.value}")

        refused("world")
        if outer.rank == 1:
            refused(first)
        else:
            refused(None, timeout=0.3)
        outer.barrier()
        dist.destroy_process_group()
        return said

    both = ["TypeError: group must be a torch.distributed.ProcessGroup, not str"]
    late, outside = pool("gloo", 2).run(program, str(tmp_path / "store"))
    assert late[:1] == outside[:1] == both
    assert "CommTimeoutError: timed out: not all of the 2 ranks of the torch group joined in time" in late[1]
    assert outside[1] == "ValueError: this process is not in the group; only its members call from_group"


def test_from_group_without_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ValueError, match="no default group"):
        un.Communicator.from_group()
    assert sys.excepthook is not sys.__excepthook__, "errors are not shown as after init"


def test_exception_names_no_call() -> None:
    def program(comm: un.Communicator) -> str | None:
        if comm.rank == 1:
            raise RuntimeError("bad batch")
        with pytest.raises(un.errors.PeerLostError):
            comm.barrier()
        return str(comm.exception())

    said, _ = on_threads(program, on_failure="continue")
    assert said == "rank 0 of 2: rank 1 failed in the program: RuntimeError: bad batch"


def test_backend_none_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    with un.init(None) as comm:
        assert comm.size == 1
    monkeypatch.setenv("UNISONO_BACKEND", "none-such")
    with pytest.raises(ValueError, match="none-such"):
        un.init(None)
    assert un.launch(lambda comm: comm.backend, 1, None) == un.launch(lambda comm: comm.backend, 1)


def test_message_that_cannot_be_delivered_fails_on_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: object, **__: object) -> None:
        raise MemoryError("no memory is left")

    def program(comm: un.Communicator) -> str:
        try:
            comm.send(torch.ones(3), 1) if comm.rank == 0 else comm.recv(torch.zeros(3), 0)
        except (MemoryError, un.errors.CommError) as error:
            return str(error)
        return "delivered"

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    assert all("no memory is left" in error for error in on_threads(program))


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_reduce_takes_op_where_all_reduce_does(backend: str) -> None:
    """And the rank first, as torch has it; all others stay unchanged."""

    def program(comm: un.Communicator) -> list[tuple[float, ...]]:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((), {}),
            (("max",), {}),
            (("max", 1), {}),
            (("max",), {"dst": 1}),
            ((), {"op": "max", "dst": 1}),
            ((1, "max"), {}),
            ((1,), {}),
            ((torch.distributed.ReduceOp.MAX, 1), {}),
        ]
        found = []
        for given, how in calls:
            t = torch.tensor([comm.rank + 1.0])
            comm.reduce(t, *given, **how)
            found.append(t.item())
        wrong: Any = comm.reduce
        with pytest.raises(ValueError, match="unknown reduce operation 2"):
            wrong(torch.ones(1), 1, 2)
        with pytest.raises((ValueError, TypeError), match="dst"):
            wrong(torch.ones(1), "max", "sum")
        return found

    first, second, third = pool(backend, 3, timeout=60.0).run(program)
    assert first == [6, 3, 1, 1, 1, 1, 1, 1]
    assert second == [2, 2, 3, 3, 3, 3, 6, 3]
    assert third == [3] * 8
