"""A repeated epoch has another order."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler

CHECK = "check_epochs"
ERROR = "another order when it is repeated"


class MUTANT(PartitionSampler):
    def set_epoch(self, epoch: int) -> Any:
        super().set_epoch(epoch)
        self._pass, self.seed = None, self.seed + 1
