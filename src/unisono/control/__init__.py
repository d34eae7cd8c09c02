"""The control plane: a small store and messages between ranks, out of band, authenticated."""

from __future__ import annotations

from unisono.control.base import Control, Rebuilt
from unisono.control.failure import Cause, cause_of, error_of
from unisono.control.local import LocalControl, LocalHub

__all__ = ["Cause", "Control", "LocalControl", "LocalHub", "Rebuilt", "cause_of", "error_of"]
