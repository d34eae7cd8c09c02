"""Repeats some samples, so that all ranks have equally many."""

from __future__ import annotations

from functools import partial

from unisono.data import PartitionSampler

CHECK = "check_ranks"
ERROR = "in more than one place"

MUTANT = partial(PartitionSampler, padding=True)
