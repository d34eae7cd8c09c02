"""The control plane: a small store and messages between ranks, out of band, authenticated."""

from __future__ import annotations

from unisono.control.base import Cause, Control

__all__ = ["Cause", "Control"]
