"""Uses the first rank's state, and ignores the others."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler

CHECK = "check_states"
ERROR = "in more than one place|in no part"


class MUTANT(PartitionSampler):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state[0] if isinstance(state, list) else state)
