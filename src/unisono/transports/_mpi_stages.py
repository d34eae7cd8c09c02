"""Sums that the ranks of one host make in memory that they share: there is no copy by the kernel, which MPI has two of.

src/compiled/stages.c makes them, in the order of ranks.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from unisono.transports._mpi_window import Level

__all__ = ["LEAST", "summed_by"]

LEAST = 1 << 12
"""Bytes from which it is faster."""

_SUM = struct.Struct("=4q")
_DTYPES = (torch.float32, torch.float64)
_NO_ROOT = -1


def summed_by(kind: Any) -> Level | None:
    """How a tensor of each rank is summed so, in place; None where MPI does it.

    Args:
        kind: The calls', as `Kind`: all_reduce, or reduce.
    """
    if kind.near.add is None or kind.op != kind.comms.mpi.SUM or kind.dtype not in _DTYPES or kind.nbytes < LEAST:
        return None
    width, root = kind.dtype.itemsize, _NO_ROOT if kind.root is None else kind.root

    def simpler(arguments: tuple[Any, ...]) -> tuple[bytes]:
        sent, received, *_ = arguments
        # Who gets the sum has it in the place of what is given.
        memory = (sent if isinstance(sent, list) else received)[0]
        return (_SUM.pack(memory.address, memory.nbytes, width, root),)

    return Level(kind.near.add, simpler)
