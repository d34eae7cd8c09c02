"""Goes by the first rank's state, whatever the others say."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler

LAW = "check_states"
COMPLAINT = "in more than one place|in no part"


class MUTANT(PartitionSampler):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state[0] if isinstance(state, list) else state)
