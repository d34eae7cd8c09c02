"""Some samples come twice, so that all ranks have equally many."""

from __future__ import annotations

from functools import partial

from unisono.data import PartitionSampler

LAW = "check_ranks"
COMPLAINT = "in more than one place"

MUTANT = partial(PartitionSampler, padding=True)
