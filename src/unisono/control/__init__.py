"""The control plane: a small store and messages between ranks, out of band, authenticated."""

from __future__ import annotations

from unisono.control.local import LocalControl, LocalHub
from unisono.core.control import Control, Rebuilt
from unisono.core.failure import Cause, cause_of, error_of

__all__ = ["Cause", "Control", "LocalControl", "LocalHub", "Rebuilt", "cause_of", "error_of"]
