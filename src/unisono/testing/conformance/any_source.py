"""Checks for any-source receives and probes. A backend without `any_source` rejects these calls with a clear error."""

from __future__ import annotations

import functools
import time

import torch

from unisono.communicator import Communicator
from unisono.errors import AbortedError, CommTimeoutError, MismatchError, PeerLostError
from unisono.testing.conformance.world import (
    Check,
    World,
    answer,
    check_loss,
    error_of,
    numbers,
    together,
    until,
    wait_all,
)

__all__ = [
    "probe_consumes_nothing",
    "receive_any_completes_without_polling",
    "receive_any_ends_with_an_error",
    "receive_any_gets_each_message_once",
    "receive_any_is_served_in_order",
    "receive_any_names_ranks_that_have_not_sent",
    "receive_any_reports_a_lost_sender",
    "receive_any_separates_tags_and_subgroups",
    "receive_any_starves_no_sender",
]

_EACH = 5


def _where_offered(check: Check) -> Check:
    """Wrap a check: if the backend has no any-source receives, only require a clear error."""

    @functools.wraps(check)
    def tried(world: World) -> None:
        if all(world.run(_is_offered)):
            check(world)

    return tried


def _is_offered(comm: Communicator) -> bool:
    refusal = error_of(comm.iprobe, ValueError)
    if "pass the sender's rank" not in refusal:
        return True
    assert error_of(lambda: comm.irecv(numbers(comm, 0)), ValueError) == refusal
    return False


@_where_offered
def receive_any_gets_each_message_once(world: World) -> None:
    """Each message, of any length, arrives once and in order per sender; the receiver gets the sender's rank."""

    def program(comm: Communicator, count: int) -> list[tuple[int, float]]:
        got = []
        if comm.rank > 0:
            for n in range(_EACH):
                comm.send(torch.full((count,), 100.0 * comm.rank + n, device=comm.device), 0)
        for _ in range(_EACH * (comm.size - 1) if comm.rank == 0 else 0):
            t = torch.zeros(count, device=comm.device)
            source = comm.recv(t)
            got.append((source, t.unique().item()))
        together(comm)
        return got

    for size, count in ((2, 1), (4, 1), (4, 1 << 16)):
        found = world.run(program, count, size=size)[0]
        for sender in range(1, size):
            brought = [value for source, value in found if source == sender]
            assert brought == [100.0 * sender + n for n in range(_EACH)], (
                f"messages attributed to rank {sender}: {brought}"
            )
        assert len(found) == _EACH * (size - 1), found


@_where_offered
def receive_any_starves_no_sender(world: World) -> None:
    """Senders with pending messages are served in turn, even if one of them has sent more messages."""

    def program(comm: Communicator, probes: bool) -> list[int]:
        got: list[int] = []
        if comm.rank > 0:
            works = [comm.isend(numbers(comm, 0), 0) for _ in range(3 * _EACH if comm.rank == 1 else 2)]
            wait_all(works)
        else:
            for turn in range(3 * _EACH + 2 * (comm.size - 2)):
                for rank in range(1, comm.size) if turn in (0, comm.size - 1) else ():
                    # Before each of the first two rounds, wait until every sender has a message pending.
                    comm.probe(rank)
                got.append(comm.recv(numbers(comm, 0), comm.probe() if probes else None))
        return got

    for probes in (False, True):
        found = world.run(program, probes, size=4)[0]
        rounds = [sorted(found[:3]), sorted(found[3:6])]
        assert rounds == [[1, 2, 3], [1, 2, 3]], f"the messages are from {found}"


@_where_offered
def receive_any_is_served_in_order(world: World) -> None:
    """Receives posted before any send match in posting order, regardless of the order of the waits."""

    def program(comm: Communicator) -> list[float]:
        got = numbers(comm, *[-1] * _EACH)
        if comm.rank == 0:
            works = [comm.irecv(got[n]) for n in range(_EACH)]
            comm.send(numbers(comm, 0), 1)
            wait_all(reversed(works))
            assert {work.source_rank() for work in works} == {1}
        elif comm.rank == 1:
            comm.recv(numbers(comm, 0))
            for n in range(_EACH):
                comm.send(numbers(comm, n), 0)
        return got.tolist()

    found = world.run(program, size=3)[0]
    assert found == list(range(_EACH)), f"arrived in the order {found}"


@_where_offered
def probe_consumes_nothing(world: World) -> None:
    """Repeated probes return the sender; a later receive from that rank, or from any rank, gets the message."""

    def program(comm: Communicator) -> list[object]:
        got = numbers(comm, -1)
        found = list[object]()
        if comm.rank == 1:
            comm.recv(numbers(comm, 0), 0)
            for value in (7, 8):
                comm.send(numbers(comm, value), 0, timeout=10 * world.timeout)
        elif comm.rank == 0:
            found += [comm.iprobe(), comm.iprobe(1)]
            found.append(error_of(lambda: comm.probe(timeout=0.05), CommTimeoutError))
            comm.send(got, 1)
            for source in (1, None):
                found += [comm.probe(source), comm.probe(), comm.iprobe(2), comm.iprobe(1)]
                found += [comm.recv(got, source), got.item()]
            found.append(comm.iprobe())
        return found

    none, from_1, late, *rest = world.run(program, size=3)[0]
    assert (none, from_1) == (None, None), "there was a message before any was sent"
    assert "ranks 1, 2" in str(late), late
    assert rest == [1, 1, None, 1, 1, 7, 1, 1, None, 1, 1, 8, None], rest


@_where_offered
def receive_any_separates_tags_and_subgroups(world: World) -> None:
    """A receive ignores messages with another tag or from another sub-group; ranks are relative to the sub-group."""

    def program(comm: Communicator) -> list[tuple[int, float]]:
        got = numbers(comm, -1)
        part = comm.subgroup([2, 1, 0])
        assert part is not None
        found = []
        if comm.rank == 0:
            for where, tag in ((part, 1), (comm, 1), (part, 0), (comm, 0)):
                source = where.recv(got, tag=tag)
                found.append((source, got.item()))
        else:
            tag = comm.rank - 1
            works = [comm.isend(numbers(comm, tag), 0, tag), part.isend(numbers(comm, 10 + tag), 2, tag)]
            wait_all(works)
        return found

    found = world.run(program, size=3)[0]
    assert found == [(0, 11), (2, 1), (1, 10), (1, 0)], found


@_where_offered
def receive_any_completes_without_polling(world: World) -> None:
    """The future and `is_completed` report completion even if nobody waits, and never before the message was sent."""

    def program(comm: Communicator, within_s: float) -> list[object]:
        got = numbers(comm, -1, -1)
        if comm.rank == 1:
            answer(comm, 0, 1)
            return []
        works = [comm.irecv(got[n]) for n in range(2)]
        before = [works[0].is_completed(), works[0].source_rank()]
        future = works[0].get_future()
        comm.send(numbers(comm, 0), 1)
        until(lambda: future.done() and works[1].is_completed(), within_s)
        future.value()
        return [*before, got.tolist(), works[1].source_rank(), works[1].exception()]

    found = world.run(program, world.soon_s)[0]
    assert found == [False, -1, [0, 1], 1, None], found


@_where_offered
def receive_any_names_ranks_that_have_not_sent(world: World) -> None:
    """The error of a wait that times out names the ranks that have not sent, and the wait may be repeated."""

    def program(comm: Communicator) -> tuple[str, str, float]:
        part = comm.dup()
        got = numbers(comm, -1)
        if comm.rank > 0:
            comm.recv(got, 0)
            if comm.rank == 1:
                part.send(got, 0)
            together(comm)
            return "", "", -1
        work = part.irecv(got)
        first = error_of(lambda: work.wait(0.05), CommTimeoutError)
        for rank in range(1, comm.size):
            comm.send(numbers(comm, 7), rank)
        work.wait()
        second = error_of(lambda: part.recv(numbers(comm, 0), timeout=0.05), CommTimeoutError)
        together(comm)
        return first, second, got.item()

    first, second, got = world.run(program, size=3)[0]
    assert got == 7, f"the second wait brought {got}"
    for text in (first, second):
        assert "from ranks 1, 2, and none arrived" in text, text


@_where_offered
def receive_any_ends_with_an_error(world: World) -> None:
    """The receive fails on abort, if no peer is left, and on a mismatched message (the sender may fail as well)."""

    def program(comm: Communicator, soon_s: float, never_s: float) -> list[str]:
        aborted = comm.dup()
        unfit = comm.dup()
        left = comm.dup()
        # Some backends connect two ranks only when they exchange their first message, and cannot detect until then that
        # a peer has left.
        together(left)
        if comm.rank == 0:
            works = [aborted.irecv(numbers(comm, 0)), left.irecv(numbers(comm, 0))]
        comm.barrier()
        if comm.rank > 0:
            aborted.abort("enough")
            unfit.isend(numbers(comm, 1, 2, 3), 0)
            left.close()
            together(comm)
            return []
        started = time.monotonic()
        text = [
            error_of(lambda: works[0].wait(never_s), AbortedError),
            error_of(lambda: unfit.recv(numbers(comm, 0), timeout=never_s), MismatchError),
            error_of(lambda: works[1].wait(never_s), PeerLostError),
        ]
        assert time.monotonic() - started < soon_s, "a wait went on"
        together(comm)
        return text

    aborted, unfit, left = world.run(program, world.soon_s, world.never_s)[0]
    assert "enough" in aborted, aborted
    assert "rank 1 sent" in unfit, unfit
    assert "rank 1" in left, left


@_where_offered
def receive_any_reports_a_lost_sender(world: World) -> None:
    """If a rank fails, a receive or probe raises an error with that rank as `peer`, even if others can still send."""
    never_s = world.never_s
    check_loss(world, lambda comm: comm.recv(numbers(comm, 0), timeout=never_s))
    check_loss(world, lambda comm: comm.probe(timeout=never_s))
