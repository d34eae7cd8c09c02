"""Every epoch is the first one."""

from __future__ import annotations

from unisono.data import PartitionSampler

LAW = "check_epochs"
COMPLAINT = "epochs 0 and 1 have the same order"


class MUTANT(PartitionSampler):
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(0)
