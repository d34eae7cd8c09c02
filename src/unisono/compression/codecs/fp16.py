"""fp16: half of float32's bytes, with a relative error of up to 1/2048."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from unisono.compression.two_stage import HalfPrecision

__all__ = ["CODEC", "Fp16"]


@dataclass(repr=False, eq=False)
class Fp16(HalfPrecision):
    """Codec that sends float16: half of float32's bytes, and 11 bits of precision for magnitudes from 6e-5 to 65504.

    A contribution is divided by the number of ranks, p, before it is rounded, so it becomes infinite beyond 65504 p;
    use bf16 for float32's full range. A NaN or an infinity in a contribution reaches every rank's result, at the same
    index.

    Example:
        >>> def program(comm):
        ...     flat = torch.tensor([1.0, 0.1]) * (comm.rank + 1)
        ...     un.compression.fp16().average(flat, comm, [flat.shape])
        ...     return flat.round(decimals=3)
        >>> un.launch(program, 2, "thread")[0]
        tensor([1.5000, 0.1500])
    """

    name = "fp16"
    half: ClassVar[torch.dtype] = torch.float16


CODEC = Fp16
