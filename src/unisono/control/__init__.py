"""The control plane: a small store and messages between ranks, out of band, authenticated."""

from __future__ import annotations

from unisono.control.base import Cause, Control, Rebuilt
from unisono.control.failure import error_of
from unisono.control.local import LocalControl, LocalHub

__all__ = ["Cause", "Control", "LocalControl", "LocalHub", "Rebuilt", "error_of"]
