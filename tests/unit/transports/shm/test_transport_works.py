"""Works of shared memory: their completion without a waiting thread, and after the other rank has left."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from insides import control_of, engine_of, plain_of
from waiting import wait_until

import unisono as un
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.errors import CommError, MismatchError, PeerLostError
from unisono.testing import pool
from unisono.transports.shm.segment import PAGE_BYTES, map_shared


def forsaken(comm: un.Communicator) -> list[str]:
    """Receive from a rank that has left: by polling, and by a future."""
    part = comm.dup()
    if comm.rank == 1:
        part.close()
        comm.barrier()
        return []
    asked, promised = (part.irecv(torch.zeros(4), 1, tag=tag) for tag in range(2))
    future = promised.get_future()
    assert wait_until(asked.is_completed)
    assert wait_until(future.done)
    comm.barrier()
    with pytest.raises(PeerLostError):
        future.value()
    return [type(work.exception()).__name__ for work in (asked, promised)]


def test_receive_from_a_departed_rank_fails() -> None:
    assert pool("shm", 2).run(forsaken)[0] == ["PeerLostError"] * 2


def futures(comm: un.Communicator) -> int:
    """Threads that see one work through whose future is asked for often."""
    if comm.rank == 1:
        comm.barrier()
        comm.send(torch.ones(1), 0)
        return 0
    work = comm.irecv(torch.zeros(1), 1)
    all_of_them = [work.get_future() for _ in range(8)]
    busy = sum(thread.name == "unisono messages" for thread in threading.enumerate())
    comm.barrier()
    for future in all_of_them:
        future.wait()
    return busy


def test_one_thread_completes_a_work() -> None:
    assert un.launch(futures, 2, "shm", timeout=20)[0] == 1


def test_rank_may_leave_after_its_message_was_received() -> None:
    assert pool("shm", 2).run(takes_the_last_message) == [None] * 2


def takes_the_last_message(comm: un.Communicator) -> None:
    part = comm.dup()
    messages = plain_of(part)._messages
    if comm.rank == 1:
        part.close()
    comm.barrier()
    if comm.rank == 1:
        return
    awaited = [1]

    def taken_by_another_thread() -> bool:
        awaited.clear()
        return False

    messages.check(taken_by_another_thread, lambda: list(awaited))
    with pytest.raises(PeerLostError, match="rank 1 has left"):
        messages.check(lambda: False, lambda: [1])


class Deadly:
    """A control plane by which rank 0 dies as soon as it has told where its memory is."""

    def __init__(self, control: Any, pid: int) -> None:
        self._control, self._pid = control, pid

    def exchange(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any]:
        told: list[Any] = self._control.exchange(group, topic, value, timeout)
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return told


def outlives_the_memory(comm: un.Communicator) -> str:
    group, control = engine_of(comm).group, control_of(comm)
    [pid, _] = comm.all_gather_object(os.getpid())
    if comm.rank == 0:
        card = struct.pack("<qqq16s", pid, 1 << 20, PAGE_BYTES, bytes(16))
        control.exchange(group, "memory: of the dead", (PAGE_BYTES, card, None), 20.0)
        control.get("never", 20.0)
    with pytest.raises(CommError) as caught:
        map_shared(group, cast("ControlPlane", Deadly(control, pid)), "of the dead", PAGE_BYTES, 20.0, mmap.mmap)
    return type(caught.value).__name__


def test_memory_lost_with_its_rank_is_a_lost_rank() -> None:
    assert un.launch(outlives_the_memory, 2, "shm", timeout=20, on_failure="continue")[1] == "PeerLostError"


def without_descriptors(comm: un.Communicator, short: int) -> str:
    """One rank may open no more files: all ranks get an error immediately, and continue."""
    known = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as files:
        if comm.rank == short:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, known[1]))
            with suppress(OSError):
                while True:
                    files.enter_context(Path(os.devnull).open())
        with pytest.raises(CommError, match=f"cannot be allocated on rank {short}.*Too many open files") as caught:
            comm.empty(4)
    resource.setrlimit(resource.RLIMIT_NOFILE, known)
    tensor = comm.empty(4).fill_(comm.rank + 1)
    comm.all_reduce(tensor)
    return f"{type(caught.value).__name__} {tensor[0].item()}"


@pytest.mark.parametrize("short", [0, 1])
def test_memory_unavailable_on_one_rank(short: int) -> None:
    assert pool("shm", 2).run(without_descriptors, short) == ["CommError 3.0"] * 2


def many_registered(comm: un.Communicator) -> bool:
    """Tensors use no keys of the control plane and no descriptors, and no mappings after they are freed."""
    control, kept = control_of(comm), []
    gc.collect()
    keys, files, maps = control.num_keys(), _count("/proc/self/fd"), _maps()
    comm.barrier()
    for _ in range(50):
        kept.append(comm.empty(10))
        comm.all_reduce(kept[-1])
    held = _count("/proc/self/fd") - files
    last = kept[-1][4:].view(2, 3)
    kept.clear()
    comm.barrier()
    assert torch.equal(last.fill_(2), torch.full_like(last, 2))
    del last
    # What others had left may go meanwhile.
    return control.num_keys() <= keys and held <= 0 and _maps() <= maps


def _count(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def _maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:unisono segment")


def test_symmetric_memory_leaves_nothing_behind() -> None:
    assert pool("shm", 2).run(many_registered) == [True] * 2


def asks_for_more(comm: un.Communicator) -> str:
    with pytest.raises(MismatchError, match=r"8192 on rank 0, 16384 on rank 1") as caught:
        comm.empty(1024 * (1 + comm.rank))
    return str(caught.value)


def test_symmetric_memory_of_different_lengths() -> None:
    assert all("bytes of all ranks" in text for text in pool("shm", 2).run(asks_for_more))


def nans(comm: un.Communicator) -> list[torch.Tensor]:
    """Sums of NaNs whose sign and payload differ between ranks: their bits."""
    found = []
    for dtype, kind, quiet in ((torch.float32, torch.int32, 0x7FC00000), (torch.float64, torch.int64, 0x7FF8 << 48)):
        for count in (1, 9, 1027, 300_001):
            bits = torch.arange(count).to(kind).remainder(1000) + quiet + 1000 * comm.rank
            bits[comm.rank :: 2] |= torch.iinfo(kind).min
            for tensor in (bits.view(dtype).clone(), comm.empty(count, dtype).copy_(bits.view(dtype))):
                for op in ("sum", "avg"):
                    comm.all_reduce(tensor, op)
                    found.append(tensor.view(kind).clone())
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_nans_are_bitwise_equal_on_all_ranks(size: int) -> None:
    first, *others = pool("shm", size).run(nans)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
