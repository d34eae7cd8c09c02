"""Translation of torch's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.core.failure import connection_error
from unisono.core.types import Message
from unisono.core.work import timeout_error
from unisono.errors import CommError

__all__ = ["translated"]


def translated(error: RuntimeError, messages: Sequence[Message], waited_s: float = 0.0) -> CommError:
    """Translate torch's error. Gloo never names the lost rank; the control plane does."""
    text = str(error)
    if re.search(r"[Tt]imed? ?out|timeout", text):
        return timeout_error(messages, waited_s)
    peer = messages[0].peer if len(messages) == 1 else None
    if re.search(r"[Cc]onnection (closed|reset|refused)|Broken pipe|closure|EOF", text):
        # The control plane reports whether that rank was the first to fail.
        return connection_error(peer)
    return CommError(f"torch.distributed failed: {text.splitlines()[0]}", peer=peer)
