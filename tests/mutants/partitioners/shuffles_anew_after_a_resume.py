"""What is left comes in another order than it would have."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler

LAW = "check_global_order"
COMPLAINT = "ranks went through"


class MUTANT(PartitionSampler):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.seed, self._pass = self.seed + 1, None
