"""The control plane: a small store and authenticated out-of-band messages between ranks."""

from typing import TYPE_CHECKING

from unisono.core.lazy import load_on_use

if TYPE_CHECKING:
    from unisono.control.local import LocalControl, LocalHub
    from unisono.core.control import ControlPlane, NewMembership
    from unisono.core.failure import Cause, error_of, to_cause

__all__ = ["Cause", "ControlPlane", "LocalControl", "LocalHub", "NewMembership", "error_of", "to_cause"]

__getattr__, __dir__ = load_on_use(
    __name__,
    {
        "unisono.control.local": "LocalControl LocalHub",
        "unisono.core.control": "ControlPlane NewMembership",
        "unisono.core.failure": "Cause error_of to_cause",
    },
)
