"""Lossy codecs that average gradients over all ranks with less traffic, optionally with error feedback.

    averager = un.GradientAverager(model, comm, compression="bf16")
    averager = un.GradientAverager(model, comm, compression=un.compression.error_feedback(un.compression.onebit()))

Each codec is a file in `codecs`, looked up by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.compression.codec import CODECS, Codec, resolve

if TYPE_CHECKING:
    from unisono.compression.codecs.bf16 import Bf16 as bf16
    from unisono.compression.codecs.error_feedback import ErrorFeedback as error_feedback
    from unisono.compression.codecs.fp16 import Fp16 as fp16
    from unisono.compression.codecs.int4 import Int4 as int4
    from unisono.compression.codecs.int8 import Int8 as int8
    from unisono.compression.codecs.onebit import Onebit as onebit
    from unisono.compression.codecs.powersgd import Powersgd as powersgd
    from unisono.compression.codecs.randomk import Randomk as randomk
    from unisono.compression.codecs.topk import Topk as topk

__all__ = [
    "CODECS",
    "Codec",
    "bf16",
    "error_feedback",
    "fp16",
    "int4",
    "int8",
    "onebit",
    "powersgd",
    "randomk",
    "resolve",
    "topk",
]

__getattr__, __dir__ = CODECS.attributes(__name__)
