"""A page of memory by which the ranks of one host agree, several times as fast as by MPI. It takes compiled code."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from unisono.compiled import part
from unisono.control import Control
from unisono.errors import CommError
from unisono.group import Group
from unisono.hosts import host_identity, shm_obstacle
from unisono.transports._shm_memory import PAGE_BYTES, meet

__all__ = ["page_of"]

_PLACES_BYTES = 128
_LOOKS, _CROWDED_LOOKS = 1000, 2

_Making = Callable[[bytearray], Any]
"""Of three words of 64 bits, in native order: what sums them over the ranks, as MPI's persistent requests do.

`start()` gives this rank's words, and `test()` tells whether all ranks have given theirs; the sums lie in their place
then. `number` counts.
"""


def page_of(group: Group, control: Control, timeout: float, crowded: bool) -> _Making:
    """What makes a page for the ranks of a group; it makes None where they share no memory, or one has no extension.

    Collective.

    Args:
        group, control, timeout: Who agrees, by what they meet, and within what time.
        crowded: Whether there are more ranks than processors: who waits gives way at once then.
    """
    page = part("Page")
    if group.size == 1:
        return _none
    usable = page is not None and shm_obstacle() is None
    there = control.exchange(group, "who could agree in memory", (usable, host_identity()), timeout)
    if not all(can for can, _ in there) or len({host for _, host in there}) > 1:
        return _none
    nbytes = -(-_PLACES_BYTES * group.size // PAGE_BYTES) * PAGE_BYTES
    try:
        memory = meet(group, control, "a page to agree on", nbytes, timeout, mmap.mmap)
    except CommError:
        # All ranks are told so. In containers, who seems to be here may not be.
        return _none
    looks = _CROWDED_LOOKS if crowded else _LOOKS
    return lambda words: page(memory, words, group.rank, group.size, looks)


def _none(_words: bytearray) -> None:
    """MPI sums."""
