"""Compare what every rank is about to do, over the control plane, before any data moves."""

from __future__ import annotations

from unisono.control import Control
from unisono.errors import MismatchError
from unisono.fingerprint import Fingerprint, explain
from unisono.transport import Transport
from unisono.wrappers.wrapper import Wrapper

__all__ = ["Checked"]


class Checked(Wrapper):
    """Every collective starts with one exchange of fingerprints: `MismatchError` on all ranks if they differ.

    Cost: one round trip to the control plane a collective, none a message.
    """

    def __init__(self, inner: Transport, control: Control) -> None:
        super().__init__(inner)
        self._control = control
        self.native = inner.native
        self.checks = True

    def rewrap(self, inner: Transport) -> Checked:
        return Checked(inner, self._control)

    def begin(self, fingerprint: Fingerprint, timeout: float) -> None:
        mine = fingerprint.values()
        if fingerprint.sends or fingerprint.receives:
            values = self._control.exchange(self.group, f"call {fingerprint.call}", mine, timeout)
        else:
            same = self._control.agree(self.group, f"call {fingerprint.call}", fingerprint.compared(), timeout)
            if same is None:
                return super().begin(fingerprint, timeout)
            values = self._control.exchange(self.group, f"call {fingerprint.call} in full", mine, timeout)
        problem = explain([Fingerprint(*value) for value in values])
        if problem:
            raise MismatchError(f"{problem}. Nothing was sent")
        return super().begin(fingerprint, timeout)
