"""The remaining samples have another order than without the resume."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler

CHECK = "check_global_order"
ERROR = "ranks went through"


class MUTANT(PartitionSampler):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.seed, self._pass = self.seed + 1, None
