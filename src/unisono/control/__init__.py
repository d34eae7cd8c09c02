"""The control plane: a small store and messages between ranks, out of band, authenticated."""

from __future__ import annotations

from unisono.control.local import LocalControl, LocalHub
from unisono.core.control import ControlPlane, NewMembership
from unisono.core.failure import Cause, error_of, to_cause

__all__ = ["Cause", "ControlPlane", "LocalControl", "LocalHub", "NewMembership", "error_of", "to_cause"]
