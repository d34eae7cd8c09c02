"""All seeds give one order."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler

CHECK = "check_epochs"
ERROR = "seeds 0 and 1 have the same order"


class MUTANT(PartitionSampler):
    def __init__(self, *args: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
