"""Calls that look after the others."""

from __future__ import annotations

from unisono.comm.base import CommunicatorBase
from unisono.core.call_site import call_site
from unisono.core.control import ControlPlane
from unisono.core.work import resolve_timeout
from unisono.errors import CommError

__all__ = ["MonitoredBarrierMixin"]


class MonitoredBarrierMixin(CommunicatorBase):
    """monitored_barrier."""

    _control: ControlPlane
    _barriers: int

    def monitored_barrier(self, timeout: float | None = None) -> None:
        """As `barrier`, over the control plane: at the timeout it names every rank that has not come, and where it is.

        Collective. Nothing travels over the backend, so it works where that one is the suspect. A barrier also says
        who is missing; this one costs more (a round trip to the control plane), and sees all of them at once.

        Args:
            timeout: Seconds; the communicator's if None.

        Raises:
            CommTimeoutError: Ranks have not come: on every rank that has, with what each is doing.
            PeerLostError: One of them is gone.

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
            raise engine.failed(error, "monitored_barrier", self._barriers) from error
        finally:
            engine.activity.leave()
