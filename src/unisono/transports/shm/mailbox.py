"""Mailbox in shared memory: a byte ring for each ordered pair of ranks, and a futex for each rank."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.mail import pack, parse
from unisono.core.tensors import view_of
from unisono.core.transport import Envelope, Mailbox
from unisono.errors import CommTimeoutError, PeerLostError
from unisono.host.native import native
from unisono.transports.shm.segment import PAGE_BYTES, map_shared

if TYPE_CHECKING:
    from unisono._native import Ring

__all__ = ["ShmMailbox"]

_RING_BYTES = 512 << 10
_LINE = 8
_SLEEPING = 0
_WAKEUPS = 1
_YIELDS = 200
_SLEEP_S = 0.0002


class _RingReader(NamedTuple):
    """The ring from a peer, and a generator that reads the ring whenever a poll resumes it."""

    peer: int
    ring: Ring
    reader: Iterator[None]


def _read(peer: int, ring: Ring, arrived: list[Envelope]) -> Iterator[None]:
    """Append a peer's messages as they arrive; yield while there is nothing to read."""
    while True:
        # Read each message in a generator of its own, so that this one keeps no message alive until the next arrives.
        yield from _read_message(peer, ring, arrived)


def _read_message(peer: int, ring: Ring, arrived: list[Envelope]) -> Iterator[None]:
    while not (available := ring.peek()):
        yield None
    # Usually, the whole message is in the ring and contiguous, and can be parsed there.
    message, end = parse(peer, available)
    if message is None:
        # Read an incomplete or non-contiguous message into new memory as it arrives. A bytearray would zero this
        # memory, which makes the system allocate all of it, even if most of the message never arrives.
        memory = torch.empty(end, dtype=torch.uint8, device="cpu")
        frame = view_of(memory)
        yield from _rest(frame, ring)
        message, end = parse(peer, frame)
        if message is None or end != len(frame):
            raise ValueError("the sender changes what it has sent")
    else:
        ring.skip(end)
    for body in message.bodies:
        yield from _rest(view_of(body), ring)
    arrived.append(message)


def _rest(part: memoryview, ring: Ring) -> Iterator[None]:
    """Fill `part`, a message's frame or body, from the ring; yield whenever no more bytes have arrived."""
    while (step := ring.read(part)) < len(part):
        part = part[step:]
        if not step:
            yield None


class ShmMailbox(Mailbox):
    """Mailbox between ranks on one host: each byte is copied twice, and there is no helper thread.

    The sender writes to the ring and, if the receiver's sleep flag is set, wakes the receiver with a futex. Before it
    sleeps, the receiver sets its flag and then checks the rings again. On each side, a lock operation between the
    access to the ring and the access to the flag keeps the processor from reordering the two accesses.

    Memory for p ranks: 512 KiB per ordered pair, allocated on first touch.
    """

    eager = True

    def __init__(self, group: Group, control: ControlPlane, timeout_s: float) -> None:
        super().__init__(group)
        module = native()
        assert module is not None
        size = group.size
        rank = group.rank
        flags = PAGE_BYTES
        rings = -(-size * _LINE * 8 // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        nbytes = rings + module.rings_nbytes(size, _RING_BYTES)
        memory = map_shared(group, control, "mailbox", nbytes, timeout_s, mmap.mmap)
        content = memoryview(memory)
        self._words = module.SharedWords(content[flags:rings])
        self._own = rank * _LINE
        self._out, incoming = module.rings(content[rings:], rank, size, _RING_BYTES)
        self._arrived: list[Envelope] = []
        self._in = [
            _RingReader(peer, ring, _read(peer, ring, self._arrived))
            for peer, ring in enumerate(incoming)
            if peer != rank
        ]
        self._locks = [threading.Lock() for _ in range(size)]
        self._fence = threading.Lock()
        self._muted = self._is_waiting = self._woken = False

    # -- sending -------------------------------------------------------------------------------
    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        ring = self._out[peer]
        deadline = clock.now() + timeout
        frame = pack(head, bodies)
        with self._locks[peer]:
            if self.lost or self.closed:
                self.check(peer)
            done = ring.write(frame)
            if done < len(frame) or bodies:
                try:
                    for part in (memoryview(frame)[done:], *map(view_of, bodies)):
                        self._put(ring, peer, part, deadline)
                except BaseException as error:
                    self.abort_message(peer, error)
                    raise
        # Releasing the lock is a fence: a receiver that sets its flag only after this check sees the bytes written.
        if self._words[peer * _LINE + _SLEEPING]:
            self._wake_rank(peer)

    def _put(self, ring: Ring, peer: int, part: memoryview, deadline: float) -> None:
        """Write a part of a message. The receiver can start reading a long part before all of it is written."""
        while (step := ring.write(part)) < len(part):
            part = part[step:]
            if not step:
                self._make_room(ring, peer, deadline)
            elif self._words[peer * _LINE + _SLEEPING]:
                self._wake_rank(peer)

    def _make_room(self, out: Ring, peer: int, deadline: float) -> None:
        """Wait until the reader has read something."""
        # Check for room instead of waiting for the next read: the reader may already have read everything, so that no
        # read follows.
        self._wake_rank(peer)
        for _ in range(_YIELDS):
            os.sched_yield()
            if out.room:
                return
        self.on_stall()
        while not out.room:
            self.check(peer)
            if clock.now() > deadline:
                raise CommTimeoutError(f"rank {peer} does not receive messages. Is it stopped?", peer=peer)
            time.sleep(_SLEEP_S)

    # -- receiving -----------------------------------------------------------------------------
    def poll(self) -> list[Envelope]:
        for incoming in self._in:
            try:
                if incoming.ring.available:
                    next(incoming.reader)
            except (ValueError, RuntimeError, MemoryError) as error:
                self._mark_invalid(incoming, error)
        if not self._arrived:
            return []
        envelopes = self._arrived.copy()
        self._arrived.clear()
        return envelopes

    def _mark_invalid(self, incoming: _RingReader, error: Exception) -> None:
        """Mark the sender of an invalid message as lost, and stop reading its ring."""
        self._in = [other for other in self._in if other is not incoming]
        self.mark_lost(incoming.peer, PeerLostError(f"rank {incoming.peer} wrote an invalid message: {error}"))

    def wait(self, timeout: float) -> None:
        words = self._words
        own = self._own
        seen = words[own + _WAKEUPS]
        if self._woken:
            # Don't sleep: `wake` was called before `seen` was read, so the futex would notice only later calls of
            # `wake`.
            self._woken = False
            return
        self._is_waiting = True
        if not self._muted:
            words[own + _SLEEPING] = 1
        with self._fence:
            pass
        if self._muted or not self._waiting():
            words.wait(own + _WAKEUPS, seen, min(max(timeout, 0.0), 1e6))
        self._is_waiting = False
        words[own + _SLEEPING] = 0

    def _waiting(self) -> bool:
        for incoming in self._in:  # noqa: SIM110  # a generator would cost more than the check
            if incoming.ring.available:
                return True
        return False

    def mute_wakeups(self) -> None:
        self._muted = True
        self._words[self._own + _SLEEPING] = 0

    def unmute(self) -> None:
        self._muted = False
        if self._is_waiting:
            self._words[self._own + _SLEEPING] = 1
        with self._fence:
            pass
        if self._waiting():
            self.wake()

    def wake(self) -> None:
        self._woken = True
        self._wake_rank(self.group.rank)

    def _wake_rank(self, rank: int) -> None:
        word = rank * _LINE + _WAKEUPS
        self._words[word] = (self._words[word] + 1) & 0xFFFFFFFF
        self._words.wake(word)
