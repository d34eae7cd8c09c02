"""A mailbox in shared memory: a ring of bytes for each ordered pair of ranks, and a bell for each rank."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence

import torch

from unisono.control import Control
from unisono.errors import CommTimeoutError, PeerLostError
from unisono.group import Group
from unisono.mailbox import Mail, Mailbox
from unisono.transports._shm_memory import PAGE_BYTES, meet
from unisono.transports._shm_streams import PAIR_WORDS, RING_BYTES, Incoming, Outgoing, framed
from unisono.transports._views import view_of

__all__ = ["ShmMailbox"]

_LINE = 8
_ASLEEP, _BELL = 0, 1
_YIELDS = 200
_NAP_S = 0.0002
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ShmMailbox(Mailbox):
    """Messages between ranks of one host: two copies of each byte, and no thread between.

    Who sends writes into the ring and, if the other one sleeps, rings its bell, a futex. Each rank has a word that
    says whether it sleeps, and reads the rings once more after it has set it; a lock taken between the two keeps the
    processor from turning them round, here and at the sender.

    Memory of p ranks: 512 KiB for each ordered pair, taken when first touched.
    """

    eager = True

    def __init__(self, group: Group, control: Control, timeout_s: float) -> None:
        super().__init__(group)
        size, rank = group.size, group.rank
        bells, rings = PAGE_BYTES, -(-size * _LINE * 8 // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        data_at = rings + -(-size * size * PAIR_WORDS * 8 // PAGE_BYTES) * PAGE_BYTES
        memory = meet(group, control, "mailbox", data_at + size * size * RING_BYTES, timeout_s, mmap.mmap)
        content = memoryview(memory)
        with torch.inference_mode(mode=False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
        self._words = content.cast("Q")[bells // 8 : rings // 8]
        self._address = data.data_ptr() + bells
        self._own = rank * _LINE
        controls = content.cast("Q")[rings // 8 : data_at // 8]

        def end(pair: int) -> tuple[memoryview, memoryview]:
            start = data_at + pair * RING_BYTES
            return controls[pair * PAIR_WORDS : (pair + 1) * PAIR_WORDS], content[start : start + RING_BYTES]

        peers = [peer for peer in range(size) if peer != rank]
        self._out = {peer: Outgoing(*end(rank * size + peer)) for peer in peers}
        self._in = [Incoming(*end(peer * size + rank), peer) for peer in peers]
        self._fence = threading.Lock()
        self._hushed = self._dozing = self._nudged = False

    # -- sending -------------------------------------------------------------------------------
    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        out = self._out[peer]
        content = framed(head, [body.numel() for body in bodies])
        with out.lock:
            self.check(peer)
            done = out.put(content)
            if done < len(content) or bodies:
                try:
                    self._send_long(out, peer, content, done, bodies, timeout)
                except BaseException as error:
                    self.lose_half_way(peer, error)
                    raise
        # Leaving the lock is a fence: what was written is seen by who sets this word later.
        if self._words[peer * _LINE + _ASLEEP]:
            self._ring(peer)

    def _send_long(
        self, out: Outgoing, peer: int, content: bytes, done: int, bodies: Sequence[torch.Tensor], timeout: float
    ) -> None:
        deadline = time.monotonic() + timeout
        while done < len(content):
            step = out.put(memoryview(content)[done:])
            done += step
            if not step:
                self._make_room(out, peer, deadline)
        asleep = peer * _LINE + _ASLEEP
        for body in bodies:
            rest, padding = view_of(body), -body.numel() % 8
            while rest:
                step = out.put_body(rest, padding)
                rest = rest[step:]
                if not step:
                    self._make_room(out, peer, deadline)
                elif self._words[asleep]:
                    # It can begin to read while the rest is written.
                    self._ring(peer)

    def _make_room(self, out: Outgoing, peer: int, deadline: float) -> None:
        """Wait until the reader has read something."""
        # What counts is that there is room, not that something is read from now on: all may have been read already.
        self._ring(peer)
        for _ in range(_YIELDS):
            os.sched_yield()
            if out.room:
                return
        self.on_stall()
        while not out.room:
            self.check(peer)
            if time.monotonic() > deadline:
                raise CommTimeoutError(f"rank {peer} takes no messages. Is it stopped?", peer=peer)
            time.sleep(_NAP_S)

    # -- receiving -----------------------------------------------------------------------------
    def poll(self) -> list[Mail]:
        mails: list[Mail] = []
        for incoming in self._in:
            if incoming.words[0] != incoming.base:
                try:
                    incoming.take(mails)
                except (ValueError, RuntimeError, MemoryError, struct.error) as error:
                    self._lose_for_nonsense(incoming, error)
        return mails

    def _lose_for_nonsense(self, incoming: Incoming, error: Exception) -> None:
        """What lies in the ring is no message: nothing more is read there."""
        self._in = [other for other in self._in if other is not incoming]
        self.lose(incoming.peer, PeerLostError(f"rank {incoming.peer} wrote what is no message: {error}"))

    def wait(self, timeout: float) -> None:
        words, own = self._words, self._own
        heard = words[own + _BELL]
        if self._nudged:
            # Since it was last looked at; from now on the bell tells.
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
        return any(incoming.words[0] != incoming.base for incoming in self._in)

    def hush(self) -> None:
        self._hushed = True
        self._words[self._own + _ASLEEP] = 0

    def unhush(self) -> None:
        self._hushed = False
        if self._dozing:
            self._words[self._own + _ASLEEP] = 1
        with self._fence:
            pass
        if self._waiting():
            self.nudge()

    def nudge(self) -> None:
        self._nudged = True
        self._ring(self.group.rank)

    def _ring(self, rank: int) -> None:
        bell = rank * _LINE + _BELL
        self._words[bell] = (self._words[bell] + 1) & 0xFFFFFFFF
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + bell * 8), _FUTEX_WAKE, 1, None, None, 0)
