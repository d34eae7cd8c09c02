"""Declares a round-robin order, but cuts contiguous runs."""

from __future__ import annotations

from functools import partial

from unisono.data import PartitionSampler
from unisono.data.partitions.contiguous import Contiguous

CHECK = "check_global_order"
ERROR = "ranks went through"


class _Pretending(Contiguous):
    interleaves = True


MUTANT = partial(PartitionSampler, partition=_Pretending)
