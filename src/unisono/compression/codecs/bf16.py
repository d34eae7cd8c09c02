"""bf16: half of float32's bytes, with its full range and a relative error of up to 1/256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from unisono.compression.two_stage import HalfPrecision

__all__ = ["CODEC", "Bf16"]


@dataclass(repr=False, eq=False)
class Bf16(HalfPrecision):
    """Codec that sends bfloat16: half of float32's bytes, and 8 bits of precision over all of float32's range.

    A NaN or an infinity in a contribution reaches every rank's result, at the same index.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([1e30, 0.1]) * (comm.rank + 1)
        ...     un.compression.bf16().average(flat, comm, [flat.shape])
        ...     return flat[0] / 1e30
        >>> abs(un.launch(program, 2, "thread")[0].item() - 1.5) < 0.01
        True
    """

    name = "bf16"
    half: ClassVar[torch.dtype] = torch.bfloat16


CODEC = Bf16
