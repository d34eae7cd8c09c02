"""Values that peers send: `unisono.serialization.decode`."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from unisono import serialization
from unisono.core.failure import Cause
from unisono.core.types import ReduceOp

REFUSALS = (ValueError,)
# The most for a byte: an empty OrderedDict in two.
MEMORY = (1 << 18, 600)

VALUES = [
    None,
    [1, -(2**70), 2.5, 1 + 2j, "text", "é" * 200, b"bytes", bytearray(b"more"), True],
    {"a": (1, 2), "b": {3, 4}, 5: frozenset((6,))},
    OrderedDict(x=[[[]]]),
    [slice(1, None, 2), range(0, 9, 3)],
    [torch.arange(6).reshape(2, 3), torch.float16, torch.device("cpu"), torch.Size((1, 2)), torch.tensor(True)],
    [np.arange(4, dtype=np.int16), np.float32(1.5)],
    [Cause("CommError", 3, "because"), ReduceOp.MAX],
    list(range(300)),
]


def seeds() -> list[bytes]:
    return [serialization.encode(value) for value in VALUES]


def run(data: bytes) -> None:
    # What is read can be written again.
    serialization.encode(serialization.decode(data))
