"""Ranks on shared memory that sum what is ready while they wait, however many processors there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

import unisono as un
from unisono.compiled import part
from unisono.gradients import bucket
from unisono.transports import _shm_ahead, _shm_arenas, _shm_kept, _shm_reductions, shm

__all__ = ["eager", "needed"]

# Words that several ranks change at once are for C alone. Where there could be an extension and is none,
# tests/properties/test_compiled.py fails.
needed = pytest.mark.skipif(part("sum_ahead") is None, reason="no compiler was here when unisono was installed")


@contextmanager
def eager(
    comm: un.Communicator, piece_bytes: int = 16, least_bytes: int = 1, chunk_bytes: int = 1
) -> Iterator[un.Communicator]:
    """A duplicate of `comm`, on all of whose memory ranks that wait sum what is ready; and nothing goes on beside.

    Args:
        piece_bytes: What is claimed at once.
        least_bytes: From which length of a tensor on.
        chunk_bytes: When so much of a gradient has come, it is taken, and told.
    """
    with (
        patch.object(shm, "cores", lambda: 1000),
        patch.object(_shm_arenas, "_AHEAD_BYTES", least_bytes),
        patch.object(_shm_reductions, "IN_PLACE_BYTES", least_bytes),
        patch.object(_shm_kept, "IN_PLACE_BYTES", least_bytes),
        patch.object(_shm_ahead, "_PIECE_BYTES", piece_bytes),
        patch.object(bucket, "_CHUNK_BYTES", chunk_bytes),
        comm.dup() as other,
    ):
        transport = other._engine.transport
        assert isinstance(transport, shm.ShmTransport)
        transport.background = False
        yield other
