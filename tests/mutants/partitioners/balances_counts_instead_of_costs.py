"""Assigns costs round-robin, as if all were equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.data.partitions.balanced import Balanced

CHECK = "check_balance"
ERROR = "part . has cost"


class MUTANT(Balanced):
    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        # The costly ones first, all to one part.
        order = self._known[samples].argsort(descending=True)
        owners = torch.empty_like(order)
        owners[order] = torch.arange(len(order)) * len(shares) // max(1, len(order))
        return owners
