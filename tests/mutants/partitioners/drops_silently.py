"""Drops some samples, so that all ranks have equally many."""

from __future__ import annotations

from functools import partial

from unisono.data import PartitionSampler

CHECK = "check_ranks"
ERROR = "in no part: 1 of 100"

MUTANT = partial(PartitionSampler, drop_last=True)
