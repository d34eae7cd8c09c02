"""A transport from outside the package: registered by name, it meets all checks by a test of two lines.

It is another kind than those inside: sends are buffered, and complete immediately.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import pytest
import torch

import unisono as un
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.core.types import Message, Recv, Send, Work
from unisono.core.work import CountdownWork, elements, size_error
from unisono.errors import PeerLostError
from unisono.testing import TransportConformance, run_ranks
from unisono.testing.conformance import CHECKS, Check, World
from unisono.transports import TRANSPORTS

Key = tuple[str, int, int, int]


class Office:
    """Letters that have been sent, and receives that wait for one. Shared by all ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.letters: defaultdict[Key, deque[torch.Tensor]] = defaultdict(deque)
        self.waiting: defaultdict[Key, deque[tuple[Recv, CountdownWork]]] = defaultdict(deque)
        self.closed: set[tuple[str, int]] = set()


class PostalTransport(Transport):
    in_process = True

    def __init__(self, group: Group, office: Office, timeout_s: float) -> None:
        self.group, self.office, self.timeout_s = group, office, timeout_s
        self.cause: BaseException | None = None
        self.works: list[CountdownWork] = []

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> PostalTransport:
        return cls(group, control.share("postal/office", Office), options.timeout_s)

    def post(self, batch: Sequence[Message]) -> Work:
        work = CountdownWork(self.timeout_s, batch)
        with self.office.lock:
            self.works = [w for w in self.works if not w.is_completed()] + [work]
            for message in batch:
                ends = (self.rank, message.peer) if isinstance(message, Send) else (message.peer, self.rank)
                key = (self.group.name, *ends, message.tag)
                if isinstance(message, Send):
                    self.office.letters[key].append(message.tensor.clone())
                    work.arrived(message)
                else:
                    self.office.waiting[key].append((message, work))
                self.deliver(key)
                if isinstance(message, Recv) and (self.group.name, message.peer) in self.office.closed:
                    work.complete(PeerLostError(f"rank {message.peer} has left", peer=message.peer))
        if self.cause is not None:
            work.complete(self.cause)
        return work

    def deliver(self, key: Key) -> None:
        while self.office.letters[key] and self.office.waiting[key]:
            letter, (recv, work) = self.office.letters[key].popleft(), self.office.waiting[key].popleft()
            sent, wanted = (elements(t.numel(), str(t.dtype)) for t in (letter, recv.tensor))
            if sent == wanted:
                recv.tensor.copy_(letter)
                work.arrived(recv)
            else:
                work.complete(size_error(key[1], sent, key[2], wanted, recv.tag, key[1]))

    def split(self, group: Group) -> PostalTransport:
        return PostalTransport(group, self.office, self.timeout_s)

    def close(self) -> None:
        with self.office.lock:
            self.office.closed.add((self.group.name, self.rank))

    def abort(self, cause: BaseException) -> None:
        self.cause = cause
        for work in list(self.works):
            work.complete(cause)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    TRANSPORTS.register("postal", PostalTransport)
    yield
    TRANSPORTS.unregister("postal")


# What such a transport may have otherwise: when sends end, what is compared, and what ends a wait.
SAMPLE = (
    "abort_ends_every_wait",
    "batch_does_not_deadlock",
    "concurrent_subgroups_equal_reference",
    "different_calls_are_rejected_on_every_rank",
    "failed_rank_is_reported_to_the_others",
    "future_completes_without_polling",
    "peers_are_separate",
    "receive_of_wrong_size_is_rejected",
    "subgroups_run_concurrently",
)


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ in SAMPLE])
def test_registered_transport_meets_checks(check: Check) -> None:
    check(World("postal"))


@pytest.mark.soak
class TestPostal(TransportConformance):
    backend = "postal"


def test_third_party_transport_is_registered_by_name() -> None:
    def program(comm: un.Communicator) -> str:
        return comm.backend

    assert run_ranks(program, 2, "postal") == ["postal", "postal"]
    with pytest.raises(ValueError, match=r"known: .*postal"):
        run_ranks(program, 2, "pigeon")


def test_duplicate_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="'postal' exists already"):
        TRANSPORTS.register("postal", PostalTransport)
