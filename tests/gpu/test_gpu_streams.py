"""Streams: a call follows work that was queued before it, precedes what is queued after it, and waits for no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fake_device
import pytest
import torch
from gpu_devices import BACKWARD, GPU, NCCL, PAIRS, THREAD, Place, listed, share_gpus
from gpu_direct import Direct
from torch import nn

import unisono as un
from unisono.transports import TRANSPORTS

COUNT = 1000


DIRECT = Place("direct", 2, GPU)
STAGED = listed(*PAIRS, THREAD)
ALL = listed(*PAIRS, THREAD, DIRECT, *NCCL)


@pytest.fixture(autouse=True, scope="module")
def direct() -> Iterator[None]:
    TRANSPORTS.register("direct", Direct)
    yield
    TRANSPORTS.unregister("direct")


def fill_late(tensor: torch.Tensor, value: float) -> None:
    """Queue work that fills a tensor, and is not done yet when this returns. The fake device does all work late."""
    filled = torch.full_like(tensor, value)
    be_busy(tensor.device)
    tensor.copy_(filled)


def be_busy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)


def side_stream(device: torch.device) -> torch.Stream:
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    return side


def blocking(comm: un.Communicator, x: torch.Tensor) -> torch.Tensor:
    comm.all_reduce(x)
    return x


def asynchronous(comm: un.Communicator, x: torch.Tensor) -> torch.Tensor:
    comm.all_reduce(x, async_op=True).wait()
    return x


def by_ring(comm: un.Communicator, x: torch.Tensor) -> torch.Tensor:
    comm.all_reduce(x, algorithm="ring", async_op=True).wait()
    return x


def queued(comm: un.Communicator, x: torch.Tensor) -> torch.Tensor:
    """Behind two other calls, in another thread."""
    others = [comm.all_reduce(x.clone(), algorithm="ring", async_op=True) for _ in range(2)]
    work = comm.all_reduce(x, async_op=True)
    for each in (*others, work):
        each.wait()
    return x


def strided(comm: un.Communicator, x: torch.Tensor) -> torch.Tensor:
    part = x.view(2, -1).t()
    comm.all_reduce(part, async_op=True).wait()
    return x


def messages(comm: un.Communicator, x: torch.Tensor) -> torch.Tensor:
    """This rank's numbers, and those of the other one."""
    other = torch.empty_like(x)
    peer = comm.size - 1 - comm.rank
    for work in comm.batch_isend_irecv([un.Send(x, peer), un.Recv(other, peer)]):
        work.wait()
    return x + other


def uneven(comm: un.Communicator, x: torch.Tensor) -> torch.Tensor:
    parts = comm.all_gather_v(x, async_op=True).result()
    return torch.stack(parts).sum(0)


CALLS = (blocking, asynchronous, by_ring, queued, strided, messages, uneven)


@pytest.mark.parametrize("place", ALL)
@pytest.mark.parametrize("call", CALLS)
def test_call_follows_the_stream_of_its_caller(
    call: Callable[[un.Communicator, torch.Tensor], torch.Tensor], place: Place
) -> None:
    def program(comm: un.Communicator) -> list[float]:
        x = torch.zeros(COUNT, device=comm.device)
        with side_stream(comm.device):
            fill_late(x, comm.rank + 1.0)
            return call(comm, x).cpu().unique().tolist()

    if place.size == 1 and call is messages:
        pytest.skip("a rank sends no message to itself")
    assert place.run(program) == [[place.size * (place.size + 1) / 2]] * place.size


@pytest.mark.parametrize("place", STAGED)
@pytest.mark.parametrize(("lag", "alpha"), [(0, None), (2, 0.0), (2, None)])
def test_periodic_exchanges_follow_the_stream_of_their_caller(lag: int, alpha: float | None, place: Place) -> None:
    """Also those in another thread, whose results are applied behind what was queued meanwhile."""

    def program(comm: un.Communicator) -> list[float]:
        weight = torch.zeros(COUNT, device=comm.device)
        # Of one or two ranks the mean; what it does last is a copy on its own stream.
        averager = un.gradients.PeriodicAverager([weight], comm, 2, overlap_steps=lag, alpha=alpha, reduce="median")
        with side_stream(comm.device):
            for step in range(1, 5):
                fill_late(weight, comm.rank + 10.0 * step)
                averager.step()
                # Waits for the other thread, on the host alone.
                averager.state_dict()
            return weight.cpu().unique().tolist()

    mean = (place.size - 1) / 2
    # What was sent after step 2 arrives after step 4, which has added 20.
    wanted = {(0, None): mean + 40, (2, 0.0): mean + 20, (2, None): mean + 40}[lag, alpha]
    assert place.run(program) == [[wanted]] * place.size


@pytest.mark.parametrize("place", ALL)
def test_result_does_not_overtake_earlier_readers(place: Place) -> None:
    """The output is read by work that was queued before the call."""

    def program(comm: un.Communicator) -> list[float]:
        mine = torch.ones(COUNT, device=comm.device)
        out = torch.full((comm.size * COUNT,), -1.0, device=comm.device)
        kept = torch.empty_like(out)
        with side_stream(comm.device):
            be_busy(comm.device)
            kept.copy_(out)
            comm.all_gather_single(out, mine, async_op=True).wait()
            return [*kept.cpu().unique().tolist(), *out.cpu().unique().tolist()]

    assert place.run(program) == [[-1.0, 1.0]] * place.size


@pytest.mark.parametrize("place", STAGED)
def test_staged_result_is_there_on_every_stream(place: Place) -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        x, y = (torch.zeros(COUNT, device=comm.device) for _ in range(2))
        peer = 1 - comm.rank
        with side_stream(comm.device):
            fill_late(x, comm.rank + 1.0)
            works = [*comm.batch_isend_irecv([un.Send(x, peer), un.Recv(y, peer)])]
            works.append(comm.all_reduce(x.clone(), async_op=True))
            works.append(comm.all_reduce(x, async_op=True))
            for work in works:
                work.wait()
        with torch.Stream(device=comm.device):
            return [t.cpu().unique().tolist() for t in (x, y)]

    assert place.run(program) == [[[3.0], [2.0]], [[3.0], [1.0]]]


@pytest.mark.parametrize("place", listed(*PAIRS, THREAD, DIRECT))
def test_memory_of_results_is_not_in_use(place: Place) -> None:
    """Results that another thread allocates take memory that earlier work may still use: on which stream matters."""

    def program(comm: un.Communicator) -> list[float]:
        apart, mine = comm.dup(), torch.ones(COUNT, device=comm.device)
        side, other, signal = side_stream(comm.device), torch.Stream(device=comm.device), torch.zeros(1).to(mine)
        if comm.rank == 1:
            with other:
                apart.recv(signal, src=0)
        for _ in range(8):
            torch.full((COUNT,), -1.0, device=comm.device)
        with side:
            mine.add_(0.0)
            work = comm.all_gather_v(mine, async_op=True)
            for _ in range(8):
                torch.full((COUNT,), -2.0, device=comm.device)
        if comm.rank == 0:
            with other:
                apart.send(signal, dst=1)
        parts = work.result()
        apart.close()
        for stream in (side, torch.accelerator.current_stream(comm.device)):
            stream.synchronize()
        return torch.stack(parts).cpu().unique().tolist()

    assert place.run(program) == [[1.0]] * place.size


@pytest.mark.parametrize("place", STAGED)
def test_call_does_not_wait_for_later_work(place: Place) -> None:
    """The caller may queue long work meanwhile: the next layers of a backward pass."""

    def program(comm: un.Communicator) -> tuple[bool, list[float]]:
        x, later = torch.ones(COUNT, device=comm.device), torch.zeros(COUNT, device=comm.device)
        stream = side_stream(comm.device)
        with stream:
            x.add_(1.0)
            work = comm.all_reduce(x, async_op=True)
            for _ in range(20):
                fill_late(later, 5.0)
            work.wait()
            busy = not stream.query()
            return busy, x.cpu().unique().tolist()

    assert place.run(program) == [(True, [4.0])] * place.size


@pytest.mark.parametrize("place", ALL)
@pytest.mark.parametrize("call", [blocking, asynchronous, by_ring, queued])
def test_call_follows_a_second_of_work(place: Place, call: Callable[..., torch.Tensor]) -> None:
    """A limit on the wait for what is queued before a call must not end the group."""

    def program(comm: un.Communicator) -> list[float]:
        x = torch.zeros(COUNT, device=comm.device)
        for _ in range(10):
            fill_late(x, 1.0)
        found = [call(comm, x).cpu().unique().tolist() for _ in range(2)]
        comm.barrier()
        return [number for each in found for number in each]

    size = place.size
    assert place.run(program) == [[size, size**2]] * size


@pytest.mark.parametrize("place", listed(*NCCL))
def test_nccl_leaves_the_host_free(place: Place) -> None:
    def program(comm: un.Communicator) -> tuple[bool, list[float]]:
        x = torch.zeros(COUNT, device=comm.device)
        comm.all_reduce(x)
        comm.barrier()
        for _ in range(10):
            fill_late(x, 1.0)
        comm.all_reduce(x)
        busy = not torch.accelerator.current_stream(comm.device).query()
        return busy, x.cpu().unique().tolist()

    assert place.run(program) == [(True, [place.size])] * place.size


@pytest.mark.parametrize("place", listed(*NCCL))
def test_close_leaves_nccl_its_data(place: Place) -> None:
    def program(comm: un.Communicator) -> list[float]:
        other, x = comm.dup(), torch.zeros(COUNT, device=comm.device)
        for _ in range(10):
            fill_late(x, 1.0)
        other.all_reduce(x)
        other.close()
        return x.cpu().unique().tolist()

    assert place.run(program) == [[place.size]] * place.size


@pytest.mark.parametrize("place", ALL)
def test_dropped_tensors_live_until_the_call_has_ended(place: Place) -> None:
    def program(comm: un.Communicator) -> list[float]:
        works = [comm.all_reduce(torch.ones(COUNT, device=comm.device), "max", async_op=True) for _ in range(4)]
        sums = [torch.full((COUNT,), comm.rank + 1.0, device=comm.device) for _ in range(4)]
        works += [comm.all_reduce(each, async_op=True) for each in sums]
        # Takes the memory of tensors that have been freed.
        for _ in range(8):
            torch.full((COUNT,), float("nan"), device=comm.device)
        for work in works:
            work.wait()
        return torch.stack(sums).cpu().unique().tolist()

    assert place.run(program) == [[place.size * (place.size + 1) / 2]] * place.size


@pytest.mark.parametrize("place", listed(*BACKWARD))
def test_gradients_of_branches_on_several_streams_are_averaged(place: Place) -> None:
    def program(comm: un.Communicator) -> list[float]:
        branches = nn.ModuleList([nn.Linear(4, 1, bias=False) for _ in range(6)]).to(comm.device)
        # Two gradients fill a bucket.
        averager = un.GradientAverager(branches, comm, bucket_cap_mb=4e-5)
        x = torch.full((1, 4), comm.rank + 1.0, device=comm.device)
        home = torch.accelerator.current_stream(comm.device)
        for _ in range(2):
            branches.zero_grad()
            outputs = []
            for branch in branches:
                side = side_stream(comm.device)
                with side:
                    outputs.append(branch(x))
                home.wait_stream(side)
            sum(outputs).backward()
        averager.remove()
        return torch.cat([b.weight.grad.flatten() for b in branches]).cpu().unique().tolist()

    assert place.run(program) == [[(place.size + 1) / 2]] * place.size


@pytest.mark.parametrize("place", STAGED)
def test_call_waits_for_its_copies_only(place: Place) -> None:
    """At most one wait for all inputs and one for all results, none for the whole device, and pinned memory."""
    if GPU == "cuda":
        pytest.skip("only the fake device counts")
    calls = 5

    def program(comm: un.Communicator) -> list[int]:
        parts = [torch.ones(COUNT, device=comm.device) for _ in range(comm.size)]
        outs = [torch.empty(COUNT, device=comm.device) for _ in range(comm.size)]
        comm.barrier()
        before = fake_device.counts()
        for _ in range(calls):
            comm.all_to_all(outs, parts)
        after = fake_device.counts()
        comm.barrier()
        return [b - a for a, b in zip(before, after, strict=True)]

    ranks = place.size if place.backend in ("thread", "direct") else 1
    for waits, device_waits, unpinned in place.run(program):
        assert 0 < waits <= 2 * calls * ranks
        assert (device_waits, unpinned) == (0, 0)


def reduce_after_a_failed_kernel(comm: un.Communicator, caught: bool) -> str:
    share_gpus(comm)
    x = torch.ones(COUNT, device=comm.device)
    comm.all_reduce(x)
    if comm.rank == 1:
        if x.is_cuda:
            torch._assert_async(x.sum() < 0)
        else:
            fake_device.fail(x, "assertion in a kernel")
    try:
        comm.all_reduce(x)
        return str(x.sum().item())
    except un.CommError as error:
        return f"from rank {error.peer}: {error}"
    except RuntimeError as error:
        if not caught:
            raise
        return str(error)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_failed_kernel_is_an_error_on_every_rank(backend: str) -> None:
    first, second = un.launch(reduce_after_a_failed_kernel, 2, backend, args=(True,), device=GPU, timeout=30)
    assert "assert" in second
    assert first.startswith("from rank 1")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_failed_kernel_is_the_error_of_a_launch(backend: str) -> None:
    """With nccl, a thread of torch's ends the process, and prints why."""
    with pytest.raises(RuntimeError, match="assert") as caught:
        un.launch(reduce_after_a_failed_kernel, 2, backend, args=(False,), device=GPU, timeout=30)
    assert not isinstance(caught.value, un.CommError)
    assert "raised on rank 1 of 2" in caught.value.__notes__
