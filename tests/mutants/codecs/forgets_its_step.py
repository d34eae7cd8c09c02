"""Draws after loading what it drew in its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.compression import randomk

CHECK = "check_state"
ERROR = "does not continue from its loaded state"


class CODEC(randomk):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({"step": 0})
