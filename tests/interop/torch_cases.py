"""Calls that programs make, each with what it returns: the same on every backend."""

from __future__ import annotations

import torch_data_movement
import torch_reductions
from torch_case import size

__all__ = ["CASES", "size"]

CASES = torch_reductions.CASES | torch_data_movement.CASES
