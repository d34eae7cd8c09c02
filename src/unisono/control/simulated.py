"""Control plane for simulated ranks: like the one for threads, except that requests take time and ranks can die."""

from __future__ import annotations

from typing import Any

from unisono.control.client_base import PendingRequest
from unisono.control.local import LocalControl, LocalHub
from unisono.core.failure import Cause
from unisono.simulation import here, name_ranks, waiting

__all__ = ["SimulatedControl", "SimulatedHub"]

_DEAD = Cause("ClosedError", None, "this rank was killed")


class SimulatedControl(LocalControl):
    """One rank's handle. At each request, the seed decides which rank runs next."""

    simulated = True
    _hub: SimulatedHub

    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        task = here()
        if task is not None:
            shown = " ".join(str(word) for word in words if isinstance(word, str | int | bool))
            task.scheduler.note(f"asks {shown}")
            task.scheduler.sleep(self._hub.request_s)
        super()._send(number, words)

    def _wait(self, waiter: PendingRequest, timeout: float) -> bool:
        words = waiter.words
        # An exchange that a rank never joins is a deadlock. A wait for a key is not a deadlock even if nobody sets the
        # key; it lasts until its deadline.
        with waiting(lambda: self._described(words), hasty=words[0] != "exchange"):
            return super()._wait(waiter, timeout)

    def _described(self, words: tuple[Any, ...]) -> str:
        if words[0] == "get":
            return f"for the key {words[1]!r}"
        if words[0] != "exchange":
            return f"for an answer to {words[0]!r}"
        missing = self._hub.state.missing_in_exchange(words[1], words[2])
        return f"for {name_ranks(missing)} to join {words[2]!r} of {words[1]}"

    def die(self) -> None:
        """Die without a message; the other ranks are notified slightly later, as after a broken connection."""
        if self._ended is None:
            self._end(_DEAD, fails_groups=False)
            task = here()
            if task is None:
                self._hub.lost(self._client)
            else:
                scheduler = task.scheduler
                scheduler.note("is dead")
                scheduler.at(scheduler.now + round(self._hub.notice_s * 1e9), lambda: self._hub.lost(self._client))


class SimulatedHub(LocalHub):
    """Control plane shared by simulated ranks.

    Args:
        request_s: Seconds until a request is answered, if it doesn't wait for other ranks.
        notice_s: Seconds from a rank's death until the other ranks are notified.
    """

    _kind = SimulatedControl

    def __init__(self, request_s: float, notice_s: float) -> None:
        super().__init__()
        self.request_s = request_s
        self.notice_s = notice_s
