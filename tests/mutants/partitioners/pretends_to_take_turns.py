"""Says that parts take turns, but cuts runs."""

from __future__ import annotations

from functools import partial

from unisono.data import PartitionSampler
from unisono.data.partitions.contiguous import Contiguous

LAW = "check_global_order"
COMPLAINT = "ranks went through"


class _Pretending(Contiguous):
    interleaves = True


MUTANT = partial(PartitionSampler, partition=_Pretending)
