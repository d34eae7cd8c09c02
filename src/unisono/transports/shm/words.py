"""Words in shared memory by which ranks synchronize."""

from __future__ import annotations

from typing import Protocol

from unisono.host.native import native

__all__ = ["Words", "words_of"]


class Words(Protocol):
    """Unsigned words of 64 bits, each written by one rank and read by others, such as counters and flags."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


def words_of(memory: memoryview) -> Words:
    """Return words whose accesses order all others to shared memory; ranks synchronize in Python by these alone.

    A rank that reads a new value sees all that its writer stored before that value, and a rank that sets a value has
    completed all its earlier reads. Each access is a sequentially consistent atomic one by the native core.
    Without the core it is a plain one, which has both properties on x86-64 only (see `why_no_shm`).

    Args:
        memory: The bytes of the words, aligned to 8.
    """
    core = native()
    if core is None:
        return memory.cast("Q")
    words: Words = core.SharedWords(memory)
    return words
