"""Knows where the last job stopped, but not that it was resumed itself."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler

LAW = "check_states"
COMPLAINT = "in more than one place"


class MUTANT(PartitionSampler):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "phases": []}
