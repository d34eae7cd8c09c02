"""Its state is where the last loader has come to, not what was trained on."""

from __future__ import annotations

from typing import Any

from unisono.data import PartitionSampler
from unisono.data.stateful_iterator import StatefulIterator

LAW = "check_global_order"
COMPLAINT = "ranks went through"


class MUTANT(PartitionSampler):
    def __iter__(self) -> StatefulIterator:
        self._last = super().__iter__()
        return self._last

    def state_dict(self) -> dict[str, Any]:
        return self._last.state_dict()
