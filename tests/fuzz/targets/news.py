"""News of the control plane, which it sends to a rank unasked."""

from __future__ import annotations

import json
from typing import Any

from unisono.control.client_base import news_of
from unisono.core.frames import Frame, Kind

REFUSALS = (ValueError,)
MEMORY = (1 << 19, 700)


def seeds() -> list[bytes]:
    news: list[Any] = [("failed", ("world", "PeerLostError", 1, "rank 1 was lost")), ("asked", 3), ("goodbye", None)]
    return [json.dumps(each).encode() for each in news]


def run(data: bytes) -> None:
    news_of(Frame(Kind.NEWS, 0, data))
