"""Mailbox in shared memory: a ring of bytes for each ordered pair of ranks, and a bell for each rank."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.mailbox import Envelope, Mailbox
from unisono.core.tensors import view_of
from unisono.errors import CommTimeoutError, PeerLostError
from unisono.transports.shm.byte_ring import Ring, nbytes_of, rings_of
from unisono.transports.shm.segment import PAGE_BYTES, meet

__all__ = ["ShmMailbox"]

_RING_BYTES = 512 << 10
_FIXED = struct.Struct("<II")
"""Bytes of the head, and number of bodies. With the lengths of these, and the head, they are the first part of a
message; each body is another part."""
_MOST_BODIES = 1 << 16
_LINE = 8
_ASLEEP, _BELL = 0, 1
_YIELDS = 200
_NAP_S = 0.0002
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Incoming(NamedTuple):
    """The ring from a peer, and the messages in it: None if the next one is incomplete."""

    peer: int
    ring: Ring
    mails: Iterator[Envelope | None]


def _mails(peer: int, ring: Ring) -> Iterator[Envelope | None]:
    """Yield the messages of a peer. A long message is read into new memory as it arrives."""
    while True:
        while not ring.available:
            yield None
        there = ring.peek()
        length, count = _FIXED.unpack_from(there)
        if count > _MOST_BODIES:
            raise ValueError(f"rank {peer} sent a message with {count} bodies")
        begin = _FIXED.size + 8 * count
        if not count and begin + length <= len(there):
            # The usual message: short, complete, and contiguous.
            head = bytes(there[begin : begin + length])
            ring.skip(begin + length)
            yield Envelope(peer, head, ())
            continue
        frame = memoryview(bytearray(begin + length))
        if (done := ring.read(frame)) < len(frame):
            yield from _rest(frame[done:], ring)
        sizes = struct.unpack_from(f"<{count}Q", frame, _FIXED.size) if count else ()
        bodies = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        for body in bodies:
            yield from _rest(view_of(body), ring)
        yield Envelope(peer, bytes(frame[begin:]), bodies)


def _rest(part: memoryview, ring: Ring) -> Iterator[None]:
    """Read the rest of a part of a message; yield while no more bytes of it are available."""
    while (step := ring.read(part)) < len(part):
        part = part[step:]
        if not step:
            yield None


class ShmMailbox(Mailbox):
    """Mailbox between ranks of one host: two copies of each byte, and no helper thread.

    The sender writes into the ring and, if the receiver sleeps, wakes it by a futex. Each rank has a flag that
    is set while it sleeps, and reads the rings once more after setting it; a lock taken between the two keeps the
    processor from reordering them, here and at the sender.

    Memory of p ranks: 512 KiB for each ordered pair, allocated on first touch.
    """

    eager = True

    def __init__(self, group: Group, control: ControlPlane, timeout_s: float) -> None:
        super().__init__(group)
        size, rank = group.size, group.rank
        bells, rings = PAGE_BYTES, -(-size * _LINE * 8 // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        memory = meet(group, control, "mailbox", rings + nbytes_of(size, _RING_BYTES), timeout_s, mmap.mmap)
        content = memoryview(memory)
        with torch.inference_mode(mode=False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
        self._words = content.cast("Q")[bells // 8 : rings // 8]
        self._address = data.data_ptr() + bells
        self._own = rank * _LINE
        self._out, incoming = rings_of(rank, size, content[rings:], _RING_BYTES)
        self._in = [_Incoming(peer, ring, _mails(peer, ring)) for peer, ring in enumerate(incoming) if peer != rank]
        self._locks = [threading.Lock() for _ in range(size)]
        self._fence = threading.Lock()
        self._hushed = self._dozing = self._nudged = False

    # -- sending -------------------------------------------------------------------------------
    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        ring, deadline = self._out[peer], time.monotonic() + timeout
        sizes = struct.pack(f"<{len(bodies)}Q", *[body.numel() for body in bodies]) if bodies else b""
        frame = _FIXED.pack(len(head), len(bodies)) + sizes + head
        with self._locks[peer]:
            self.check(peer)
            done = ring.write(frame)
            if done < len(frame) or bodies:
                try:
                    for part in (memoryview(frame)[done:], *map(view_of, bodies)):
                        self._put(ring, peer, part, deadline)
                except BaseException as error:
                    self.abort_message(peer, error)
                    raise
        # Releasing the lock is a fence: a rank that sets this flag later sees the bytes written.
        if self._words[peer * _LINE + _ASLEEP]:
            self._ring(peer)

    def _put(self, ring: Ring, peer: int, part: memoryview, deadline: float) -> None:
        """Write a part of a message. The receiver can begin to read a long one while the rest is written."""
        while (step := ring.write(part)) < len(part):
            part = part[step:]
            if not step:
                self._make_room(ring, peer, deadline)
            elif self._words[peer * _LINE + _ASLEEP]:
                self._ring(peer)

    def _make_room(self, out: Ring, peer: int, deadline: float) -> None:
        """Wait until the reader has read something."""
        # The condition is room, not a later read: the reader may have read everything already.
        self._ring(peer)
        for _ in range(_YIELDS):
            os.sched_yield()
            if out.room:
                return
        self.on_stall()
        while not out.room:
            self.check(peer)
            if time.monotonic() > deadline:
                raise CommTimeoutError(f"rank {peer} does not receive messages. Is it stopped?", peer=peer)
            time.sleep(_NAP_S)

    # -- receiving -----------------------------------------------------------------------------
    def poll(self) -> list[Envelope]:
        mails: list[Envelope] = []
        for incoming in self._in:
            try:
                while incoming.ring.available:
                    mail = next(incoming.mails)
                    if mail is not None:
                        mails.append(mail)
            except (ValueError, RuntimeError, MemoryError, struct.error) as error:
                self._lose_for_nonsense(incoming, error)
        return mails

    def _lose_for_nonsense(self, incoming: _Incoming, error: Exception) -> None:
        """Mark the sender as lost after an invalid message: its ring is not read any more."""
        self._in = [other for other in self._in if other is not incoming]
        self.mark_lost(incoming.peer, PeerLostError(f"rank {incoming.peer} wrote an invalid message: {error}"))

    def wait(self, timeout: float) -> None:
        words, own = self._words, self._own
        heard = words[own + _BELL]
        if self._nudged:
            # Nudged since the last look; from now on the bell reports it.
            self._nudged = False
            return
        self._dozing = True
        if not self._hushed:
            words[own + _ASLEEP] = 1
        with self._fence:
            pass
        if self._hushed or not self._waiting():
            seconds = min(max(timeout, 0.0), 1e6)
            nap = _Timespec(int(seconds), int(seconds % 1 * 1e9))
            address = ctypes.c_void_p(self._address + (own + _BELL) * 8)
            _libc.syscall(
                _SYS_FUTEX, address, _FUTEX_WAIT, ctypes.c_uint32(heard & 0xFFFFFFFF), ctypes.byref(nap), None, 0
            )
        self._dozing = False
        words[own + _ASLEEP] = 0

    def _waiting(self) -> bool:
        return any(incoming.ring.available for incoming in self._in)

    def mute_wakeups(self) -> None:
        self._hushed = True
        self._words[self._own + _ASLEEP] = 0

    def unmute(self) -> None:
        self._hushed = False
        if self._dozing:
            self._words[self._own + _ASLEEP] = 1
        with self._fence:
            pass
        if self._waiting():
            self.wake()

    def wake(self) -> None:
        self._nudged = True
        self._ring(self.group.rank)

    def _ring(self, rank: int) -> None:
        bell = rank * _LINE + _BELL
        self._words[bell] = (self._words[bell] + 1) & 0xFFFFFFFF
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + bell * 8), _FUTEX_WAKE, 1, None, None, 0)
