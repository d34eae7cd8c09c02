"""Memory that the ranks of one host share, by which they agree several times as fast as by MPI.

It takes compiled code.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from typing import Any

from unisono.compiled import part
from unisono.control import Control
from unisono.errors import CommError
from unisono.group import Group
from unisono.hosts import host_identity, shm_obstacle
from unisono.transports._mpi_agreement import Agreement, word_of
from unisono.transports._mpi_comms import Comms
from unisono.transports._mpi_window import Near, Window
from unisono.transports._shm_memory import PAGE_BYTES, meet

__all__ = ["Shared", "shared_by"]

_LINES_BYTES, _ADDRESS_BYTES = 128, 8
_STAGE_BYTES = 1 << 19
_PROOF_BYTES = 16
_LOOKS, _CROWDED_LOOKS = 1000, 2


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory that is the same on all ranks of a group, and what is made in it.

    Attributes:
        memory: A place for each rank's words, one for each pair of ranks, and two stages for each rank. What is not
            used takes none.
        group: The ranks.
        pids: Of their processes.
        crowded: Whether there are more ranks than processors: who waits gives way at once then.
    """

    memory: mmap.mmap
    group: Group
    pids: tuple[int, ...]
    crowded: bool

    def page(self, words: bytearray) -> Any:
        """What sums three words of 64 bits, in native order, over the ranks, as MPI's persistent requests do.

        `start()` gives this rank's words, and `test()` tells whether all ranks have given theirs; the sums lie in their
        place then. `number` counts.
        """
        looks = _CROWDED_LOOKS if self.crowded else _LOOKS
        return part("Page")(self.memory, words, self.group.rank, self.group.size, looks)

    def near(self, control: Control, timeout: float, agreement: Agreement, comms: Comms) -> Near:
        """What collectives are made by. Collective.

        Args:
            control, timeout: By what ranks meet, and within what time.
            agreement: By whose page they wait for each other; by itself where some are late.
            comms: Of the ranks.
        """
        meeting = part("Meeting")(agreement.page, agreement, comms, agreement.say(word_of(("on the way",))))
        behind = memoryview(self.memory)[_page_bytes(self.group.size) :]
        stages = part("Stages")(behind, meeting, part("Storing")())
        return Near(self._window(control, timeout, meeting), stages.add)

    def _window(self, control: Control, timeout: float, meeting: Any) -> Window | None:
        """None, on all ranks, where one may not read another's memory, as in some containers."""
        size = self.group.size
        shown = memoryview(self.memory)[_LINES_BYTES * size : _page_bytes(size)]
        made = part("Window")(shown, struct.pack(f"={size}i", *self.pids), meeting)
        proof = secrets.token_bytes(_PROOF_BYTES)
        place, found = ctypes.create_string_buffer(proof, _PROOF_BYTES), bytearray(_PROOF_BYTES)
        told = control.exchange(self.group, "memory to read", (ctypes.addressof(place), proof), timeout)
        seen = all(made.reads(rank, at, found) and found == other for rank, (at, other) in enumerate(told))
        # Until all have read it, it stays.
        can = all(control.exchange(self.group, "memory was read", seen, timeout))
        return Window(made.move, self.crowded) if can else None


def _page_bytes(size: int) -> int:
    """What comes before the stages."""
    nbytes = (_LINES_BYTES + _ADDRESS_BYTES * size) * size
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def shared_by(group: Group, control: Control, timeout: float, crowded: bool) -> Shared | None:
    """Memory for the ranks of a group; None, on all of them, where they share none, or one has no extension.

    Collective.

    Args:
        group, control, timeout: Who agrees, by what they meet, and within what time.
        crowded: Whether there are more ranks than processors, as this one sees it.
    """
    if group.size == 1:
        return None
    usable = part("Page") is not None and shm_obstacle() is None
    told = control.exchange(group, "who shares memory", (usable, host_identity(), os.getpid(), crowded), timeout)
    if not all(can for can, *_ in told) or len({host for _, host, *_ in told}) > 1:
        return None
    nbytes = _page_bytes(group.size) + 2 * _STAGE_BYTES * group.size
    try:
        memory = meet(group, control, "a page to agree on", nbytes, timeout, mmap.mmap)
    except CommError:
        # All ranks are told so. In containers, who seems to be here may not be.
        return None
    return Shared(memory, group, tuple(pid for *_, pid, _ in told), any(said for *_, said in told))
