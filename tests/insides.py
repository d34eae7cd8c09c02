"""The inside of a communicator, for tests of what no call shows: this file alone knows where it is kept."""

from __future__ import annotations

from typing import Any

import unisono as un
from unisono.communicator import engine_of
from unisono.control.client import SocketControl
from unisono.control.client_base import CLOSED

__all__ = ["control_of", "cut", "engine_of", "plain_of", "transport_of"]


def transport_of(comm: un.Communicator) -> Any:
    """The transport that carries its calls."""
    return engine_of(comm).transport


def plain_of(comm: un.Communicator) -> Any:
    """Return that transport, without the check that a communicator adds."""
    return comm._plain()


def control_of(comm: un.Communicator) -> Any:
    """This rank's handle to the control plane."""
    return engine_of(comm).control


def cut(control: Any) -> None:
    """End a handle to a control plane as a killed process does: without a goodbye."""
    if isinstance(control, SocketControl):
        control._connection.hang_up()
    else:
        control._end(CLOSED, fails_groups=False)
        control._hub.lost(control._client)
