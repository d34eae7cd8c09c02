"""Every epoch has the order of the first."""

from __future__ import annotations

from unisono.data import PartitionSampler

CHECK = "check_epochs"
ERROR = "epochs 0 and 1 have the same order"


class MUTANT(PartitionSampler):
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(0)
