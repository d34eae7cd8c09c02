"""Calls that monitor the other ranks."""

from __future__ import annotations

from unisono.comm.base import CommunicatorBase
from unisono.core.call_site import call_site
from unisono.core.control import ControlPlane
from unisono.core.failure import raise_caused
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import CommError

__all__ = ["MonitoredBarrierMixin"]


class MonitoredBarrierMixin(CommunicatorBase):
    """monitored_barrier."""

    _control: ControlPlane
    _barriers: int

    def monitored_barrier(self, timeout: Timeout | None = None) -> None:
        """Run a barrier over the control plane; on timeout, name every missing rank and its current location.

        Collective. Sends nothing over the backend, so it works where the backend is suspect. `barrier` also names
        missing ranks; this one costs more (a round trip to the control plane), and finds all of them in one call.

        Args:
            timeout: Seconds or a `timedelta`; the communicator's if None.

        Raises:
            CommTimeoutError: Ranks are missing: raised on every rank that has joined, with each one's activity.
            PeerLostError: One of the ranks is gone.

        Example:
            >>> un.launch(lambda comm: comm.monitored_barrier(timeout=5), nprocs=3, backend="thread")
            [None, None, None]
        """
        self._engine.enter("monitored_barrier")
        engine, limit = self._engine, resolve_timeout(timeout, self._engine.options.timeout_s)
        self._barriers += 1
        noted = "monitored_barrier", None, "", call_site()
        engine.activity.note(noted)
        engine.activity.enter(noted)
        try:
            self._control.exchange(engine.group, f"monitored_barrier #{self._barriers}", None, limit)
        except CommError as error:
            raise_caused(engine.report_failure(error, "monitored_barrier", self._barriers), error)
        finally:
            engine.activity.leave()
