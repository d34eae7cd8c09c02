"""Backend tcp: the native executor has the bits of the one in Python, and nothing moves before all agree."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha1
from itertools import count, product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pairwise import short

import unisono as un
from unisono.algorithms import serving
from unisono.core.numbers import MESSAGE_HEADER, Status
from unisono.errors import MismatchError, PeerLostError, UnavailableError
from unisono.host.native import native
from unisono.testing import pool, run_ranks

if TYPE_CHECKING:
    from unisono._native import TcpCore

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.bool)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int64)
ALL_DTYPES = (*DTYPES, torch.float64, torch.float16, torch.complex128, *INTEGERS)
LENGTHS = (0, 1, 5, 1000, 40_001)
"""The last one is longer than what goes at once, and its parts are uneven."""
EDGES = (16_383, 16_384, 16_385, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 19) + 7)
"""Float32 about what goes at once, 64 KiB, and about a slice, 1 MiB."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "gather", "scatter", "all_gather", "all_to_all")


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sum depends on the order, but for integers."""
    made = torch.Generator().manual_seed(numel * 64 + rank)
    values = torch.randn(numel, 2, generator=made)
    if dtype.is_complex:
        return torch.view_as_complex(values).to(dtype)
    return (values[:, 0] * 100).to(dtype) if dtype is not torch.bool else values[:, 0] > 0


def outcome(comm: un.Communicator, name: str, algorithm: str, numel: int, dtype: torch.dtype) -> list[bytes]:
    """Digests of a rank's results. The root is the last rank."""
    size, root, mine = comm.size, comm.size - 1, contribution(comm.rank, numel, dtype)
    scatters, gathers = ("reduce_scatter", "scatter", "all_to_all"), ("gather", "all_gather", "all_to_all")
    # To draw and digest what a call does not use takes longer than the call.
    parts = [contribution(comm.rank * size + rank, numel, dtype) for rank in range(size) if name in scatters]
    many, one = [torch.zeros_like(mine) for _ in range(size) if name in gathers], torch.zeros_like(mine)
    here = comm.rank == root
    if name == "all_reduce":
        comm.all_reduce(mine, algorithm=algorithm)
    elif name == "reduce":
        comm.reduce(mine, root, algorithm=algorithm)
    elif name == "broadcast":
        comm.broadcast(mine, root, algorithm=algorithm)
    elif name == "reduce_scatter":
        comm.reduce_scatter(one, parts, algorithm=algorithm)
    elif name == "gather":
        comm.gather(mine, many if here else None, root, algorithm=algorithm)
    elif name == "scatter":
        comm.scatter(one, parts if here else None, root, algorithm=algorithm)
    elif name == "all_gather":
        comm.all_gather(many, mine, algorithm=algorithm)
    else:
        comm.all_to_all(many, parts, algorithm=algorithm)
    # Digests: all results of all ranks and lengths are too many bytes.
    return [sha1(tensor.view(torch.uint8).numpy().tobytes()).digest() for tensor in (mine, one, *many)]


def outcomes(comm: un.Communicator, name: str, cases: list[tuple[str, int, torch.dtype]]) -> list[list[bytes]]:
    return [outcome(comm, name, *case) for case in cases]


@short(
    "name, size",
    product([*REDUCING, *MOVING], [2, 3, 4]),
    [("all_reduce", 2), *product([*REDUCING, *MOVING], [3])],
)
def test_both_executors_have_the_same_bits(name: str, size: int) -> None:
    assert_same_bits(name, size, DTYPES[:1], LENGTHS)
    if name in REDUCING:
        # Other dtypes have other kernels, and the same chunks and messages.
        assert_same_bits(name, size, DTYPES[1:], LENGTHS[-1:])


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", [*REDUCING, *MOVING])
def test_bits_are_the_same_at_the_edges(name: str, size: int) -> None:
    assert_same_bits(name, size, ALL_DTYPES if name in REDUCING else DTYPES[:1], LENGTHS)
    assert_same_bits(name, size, DTYPES[:1], EDGES)


def assert_same_bits(name: str, size: int, dtypes: Sequence[torch.dtype], lengths: Sequence[int]) -> None:
    cases = [
        (algorithm, numel, dtype)
        for dtype in dtypes
        for algorithm in serving(name, size, rounded=dtype.is_floating_point or dtype.is_complex, uneven=False)
        for numel in lengths
    ]
    expected = run_ranks(outcomes, size, "thread", name, cases)
    for backend in ("tcp", "shm"):
        assert pool(backend, max(4, size)).run(outcomes, name, cases, size=size) == expected


WRONG: dict[str, Any] = {
    "root of broadcast": lambda comm, t: comm.broadcast(t, comm.rank % 2),
    "root of reduce": lambda comm, t: comm.reduce(t, comm.rank // 2),
    "root of gather": lambda comm, t: comm.gather(
        t, [torch.empty_like(t) for _ in range(4)] if comm.rank == comm.rank % 2 else None, comm.rank % 2
    ),
    "algorithm": lambda comm, t: comm.all_reduce(t, algorithm=("ring", "one_shot")[comm.rank // 2]),
    "dtype": lambda comm, t: comm.all_reduce(t if comm.rank < 3 else torch.ones(t.numel(), dtype=torch.int32)),
    "length": lambda comm, t: comm.all_reduce(t if comm.rank < 3 else torch.ones(7)),
    "operation": lambda comm, t: comm.all_reduce(t) if comm.rank else comm.barrier(),
    "op at the far end of a ring": lambda comm, t: comm.all_reduce(
        t, "sum" if comm.rank < 3 else "max", algorithm="ring"
    ),
}


def differs(comm: un.Communicator, what: str, numel: int) -> tuple[str, bool, float]:
    tensor = torch.full((numel,), float(comm.rank))
    if comm.rank == 3:
        # Time for the others to go as far as they can without this rank; no outcome depends on it.
        time.sleep(0.1)
    began = time.monotonic()
    # A group of its own breaks alone, so that the same ranks serve the next case.
    group = comm.dup()
    try:
        WRONG[what](group, tensor)
    except MismatchError as error:
        return error.message, bool(tensor.eq(comm.rank).all()), time.monotonic() - began
    return "", False, 0.0


@short("what, numel", product(WRONG, [2, 100_000]), [*product(WRONG, [100_000]), *product([*WRONG][:2], [2])])
def test_nothing_is_written_before_all_agree(what: str, numel: int) -> None:
    found = pool("tcp", 4).run(differs, what, numel)
    assert all("ranks differ in" in message and unchanged for message, unchanged, _ in found), found


def kills(comm: un.Communicator) -> tuple[int | None, float]:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        comm.all_reduce(torch.ones(100_000))
    except PeerLostError as error:
        return error.peer, time.monotonic() - began
    return None, 0.0


def test_killed_rank_is_named() -> None:
    with pytest.raises(PeerLostError, match="rank 1"):
        un.launch(kills, 3, "tcp")


def test_ranks_without_the_native_core_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_NO_EXTENSIONS", "1")
    with pytest.raises(UnavailableError, match=r"needs unisono's native core, which rank 0 has not.*'gloo'"):
        un.launch(kills, 2, "tcp")


def without_descriptors(comm: un.Communicator, short: int) -> tuple[str, float]:
    """One rank may listen, and then open no more files."""
    known, files = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    if comm.rank == short:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, known[1]))
        with suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        os.close(files.pop())
    started = time.monotonic()
    with pytest.raises(un.CommError) as caught:
        comm.dup()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("short", [0, 1])
def test_rank_without_descriptors_is_named(short: int) -> None:
    for text, took_s in un.launch(without_descriptors, 2, "tcp", args=(short,), timeout=20):
        assert f"rank {short} cannot open a connection to each of the other ranks: Too many open files" in text
        assert took_s < 5


def crossing(comm: un.Communicator) -> list[float]:
    """32 MiB without a posted receive, more than sockets buffer, hold up no other collective and no other message."""
    other, peer = comm.dup(), 1 - comm.rank
    long = comm.isend(torch.full((8 << 20,), float(comm.rank)), peer, tag=1)
    few = torch.ones(2)
    other.all_reduce(few)
    comm.sendrecv(few, peer, few.clone(), peer)
    comm.all_reduce(few)
    came = torch.empty(8 << 20)
    comm.recv(came, peer, tag=1)
    long.wait()
    other.close()
    return [few[0].item(), came.min().item(), came.max().item()]


def test_long_message_holds_nothing_up() -> None:
    assert un.launch(crossing, 2, "tcp") == [[4.0, 1.0, 1.0], [4.0, 0.0, 0.0]]


def of_threads(comm: un.Communicator) -> list[float]:
    """Threads that receive from one peer, in another order than it sends."""
    found = [torch.empty(3) for _ in range(8)]
    if comm.rank == 0:
        for tag in reversed(range(8)):
            comm.send(torch.full((3,), float(tag)), 1, tag)
        return []
    works = [comm.irecv(tensor, 0, tag) for tag, tensor in enumerate(found)]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [tensor[0].item() for tensor in found]


def test_threads_wait_for_messages_of_one_peer() -> None:
    assert un.launch(of_threads, 2, "tcp")[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    "numbers", [[2, 0, 0], [0, 1, 0, 5, 1, 0, 1], [0, 1, 0, 1, 1, 0, 9], [0, 1, 0, 1], [0, 1, 0, 1, -1], [1, 0]]
)
def test_numbers_that_are_no_steps_are_refused(numbers: list[int]) -> None:
    module = native()
    assert module is not None
    with pytest.raises(ValueError, match="no steps of an algorithm"):
        module.Program(numbers, 4, 2, 0)


@pytest.fixture
def alone() -> Iterator[tuple[TcpCore, socket.socket]]:
    """The core of rank 0 of 2, and the connection on which rank 1 would be."""
    module = native()
    assert module is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        both = [-1, ours.fileno()]
        no_hosts = module.Hosts([], bytearray(), [])
        yield module.TcpCore(0, both, both, False, 1 << 20, [("float32", 4)], print, no_hosts), theirs


@pytest.mark.parametrize(
    "frame",
    [b"\0" * 24, b"\xff" * 24, b"\1\0\0\0\0\0\0\0" + b"\1\0\0\0" + b"\7\0\0\0" + b"\0" * 8],
    ids=["zeros", "ones", "kind"],
)
def test_frame_that_is_none_of_the_call_is_refused(frame: bytes, alone: tuple[TcpCore, socket.socket]) -> None:
    core, other = alone
    other.sendall(frame)
    outcome = core.compare(1, [], time.monotonic() + 5.0)
    assert outcome is not None
    assert outcome.status == Status.MISMATCH


def test_second_thread_in_a_core_is_an_error(alone: tuple[TcpCore, socket.socket]) -> None:
    core, other = alone
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(core.compare, 1, [], time.monotonic() + 60.0)
        # It has begun when its news arrive.
        assert other.recv(24)
        with pytest.raises(RuntimeError, match="two threads are in one core of a communicator"):
            core.compare(2, [], time.monotonic() + 60.0)
        core.abort()
        outcome = waiting.result()
    assert outcome is not None
    assert outcome.status == Status.ABORTED


def test_interrupt_is_seen_while_bytes_never_stop(alone: tuple[TcpCore, socket.socket]) -> None:
    core, other = alone
    ended = threading.Event()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def feed() -> None:
        # The signal comes to this thread, so it ends no poll of the other one, which only ever finds bytes.
        other.sendall(struct.pack(MESSAGE_HEADER, 0, 1 << 20, 1))
        for number in count():
            if number == 10:
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            if ended.wait(0.002):
                return
            other.sendall(bytes(64))

    target = torch.empty(1 << 20)
    # Not SIGINT, which workers of pytest-xdist ignore.
    before = signal.signal(signal.SIGUSR1, interrupt)
    with ThreadPoolExecutor(1) as threads:
        feeding = threads.submit(feed)
        try:
            with pytest.raises(KeyboardInterrupt):
                core.receive(1, 0, 1, target.data_ptr(), target.numel(), time.monotonic() + 20)
        finally:
            ended.set()
            signal.signal(signal.SIGUSR1, before)
        feeding.result()
