"""Reports the length of the longest part."""

from __future__ import annotations

from unisono.data import PartitionSampler

CHECK = "check_ranks"
ERROR = r"ranks report \[34, 34, 34\]"


class MUTANT(PartitionSampler):
    def __len__(self) -> int:
        return (len(self.dataset) + self.num_replicas - 1) // self.num_replicas
