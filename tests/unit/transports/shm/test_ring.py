"""Ring of bytes in shared memory: what is written in parts is read in parts, whatever the ends do in between."""

from __future__ import annotations

import gc
from itertools import chain, cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.host.native import native
from unisono.transports.tagged_messages import Bytes

CORE = native()
pytestmark = pytest.mark.skipif(CORE is None, reason="no compiler was here when unisono was installed")

RING_BYTES = 1024
LINE_BYTES = 64


def ends() -> tuple[Any, Bytes]:
    """Both ends of the ring from rank 0 to rank 1."""
    assert CORE is not None
    memory = bytearray(CORE.rings_nbytes(2, RING_BYTES))
    (_, to), _ = CORE.rings(memory, 0, 2, RING_BYTES)
    _, (came, _) = CORE.rings(memory, 1, 2, RING_BYTES)
    return to, came


@given(
    lengths=st.lists(st.sampled_from([0, 1, 8, 63, 64, 65, 255, 256, 257, 1000, 1024, 3000]), max_size=12),
    turns=st.lists(st.booleans(), max_size=30),
)
def test_parts_arrive_whole_and_in_order(lengths: list[int], turns: list[bool]) -> None:
    to, came = ends()
    parts = [bytes((number * 7 + place) % 251 for place in range(length)) for number, length in enumerate(lengths)]
    found = [bytearray(length) for length in lengths]
    unsent, unread = [memoryview(part) for part in parts], [memoryview(part) for part in found]
    for writes in chain(turns, cycle([True, False])):
        queue, move = (unsent, to.write) if writes else (unread, came.read)
        if queue:
            queue[0] = queue[0][move(queue[0]) :]
            if not queue[0]:
                queue.pop(0)
        elif not unsent and not unread:
            break
    assert found == parts
    assert (to.room, came.available, unsent) == (RING_BYTES, 0, [])


def test_parts_begin_at_a_cache_line() -> None:
    to, came = ends()
    assert to.write(b"abc") == 3
    assert came.available == LINE_BYTES
    into = memoryview(bytearray(3))
    assert (came.read(into), bytes(into), came.available) == (3, b"abc", 0)


def test_part_can_be_published_with_the_next() -> None:
    to, came = ends()
    assert to.write(b"head", more=True) == 4
    assert (came.available, to.room) == (0, RING_BYTES - LINE_BYTES)
    assert to.write(b"") == 0
    assert came.available == LINE_BYTES


def test_peek_consumes_nothing() -> None:
    to, came = ends()
    to.write(b"abcd")
    for _ in range(2):
        assert (bytes(came.peek()[:4]), came.available) == (b"abcd", LINE_BYTES)
    came.skip(4)
    assert came.available == 0


def test_full_ring_accepts_nothing() -> None:
    to, came = ends()
    rest = memoryview(bytes(2 * RING_BYTES))
    while step := to.write(rest):
        rest = rest[step:]
    assert (len(rest), to.room) == (RING_BYTES, 0)
    assert came.read(memoryview(bytearray(2 * RING_BYTES))) == to.write(rest) == RING_BYTES // 4


def test_ring_keeps_its_memory() -> None:
    to, came = ends()
    to.write(b"abcd")
    shown = came.peek()
    del to, came
    gc.collect()
    assert bytes(shown[:4]) == b"abcd"


@pytest.mark.parametrize(("memory", "error"), [(bytes(1 << 13), BufferError), (bytearray(64), ValueError)])
def test_memory_that_cannot_hold_rings_is_refused(memory: bytes | bytearray, error: type[Exception]) -> None:
    assert CORE is not None
    with pytest.raises(error):
        CORE.rings(memory, 0, 2, RING_BYTES)


def test_arguments_that_are_no_memory_are_refused() -> None:
    to, came = ends()
    with pytest.raises(TypeError):
        to.write("text")
    with pytest.raises(BufferError):
        came.read(memoryview(b"constant"))
