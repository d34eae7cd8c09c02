"""Simulates slower links: delays each message, and limits the bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from unisono.core import clock
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.core.work import WorkGroup
from unisono.errors import ClosedError
from unisono.wrappers.base import Wrapper
from unisono.wrappers.delay_queue import DelayedSend, DelayQueue

__all__ = ["Delayed", "LinkModel"]


class LinkModel:
    """Send times of messages over slow links, following the postal model of a network.

    Args:
        latency_s: Delay of each message, in seconds.
        bytes_per_s: Bandwidth of the link to one rank, in bytes per second; unlimited if None.
    """

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free_at: dict[int, float] = {}

    def due(self, send: Send, longer_s: float = 0.0) -> float:
        """Return a message's send time on the library's clock.

        The message is due `latency_s + longer_s` seconds after its last byte has entered the link.
        """
        start = max(clock.now(), self._free_at.get(send.peer, 0.0))
        if self._bytes_per_s is not None:
            start += send.tensor.nbytes / self._bytes_per_s
        self._free_at[send.peer] = start
        return start + self._latency_s + longer_s


class Delayed(Wrapper):
    """Delays each message that this rank sends, and limits the bandwidth. No message is lost or reordered.

    Use this wrapper to test a program on a slower network, or with one slow rank. The wrapper hides native collectives,
    so that collectives consist of messages, which are delayed. On simulated ranks, the delays are in virtual time.

    Args:
        inner: The transport to slow down.
        latency_s: Delay of each message, in seconds.
        bytes_per_s: Bandwidth of the link to each rank, in bytes per second; unlimited if None.
        jitter: Maximum random increase of each message's latency, as a fraction of `latency_s`.
        seed: Seed for the jitter.

    Raises:
        ValueError: `latency_s` or `jitter` is negative, or `bytes_per_s` is not positive.

    Example:
        >>> from unisono.testing import Delayed
        >>> def program(comm):
        ...     t = torch.ones(2)
        ...     comm.all_reduce(t)
        ...     return t.tolist()
        >>> run = un.simulate(program, 2, wrap=lambda inner: Delayed(inner, latency_s=1.0))
        >>> run.results, 1.0 < run.time_s < 1.1
        ([[2.0, 2.0], [2.0, 2.0]], True)
    """

    def __init__(
        self,
        inner: Transport,
        latency_s: float = 0.0,
        *,
        bytes_per_s: float | None = None,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        if latency_s < 0 or jitter < 0:
            raise ValueError(f"latency_s and jitter must not be negative: not {latency_s!r}, {jitter!r}")
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, not {bytes_per_s!r}")
        self._wrap = partial(Delayed, latency_s=latency_s, bytes_per_s=bytes_per_s, jitter=jitter, seed=seed)
        self._jitter_s = latency_s * jitter
        self._slowness = LinkModel(latency_s, bytes_per_s)
        self._chance = Random(f"{seed} {self.group.name} {self.rank}")
        self._late = DelayQueue(inner)

    def wrap_child(self, inner: Transport) -> Delayed:
        return self._wrap(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        # Post receives first, because they must not wait behind delayed sends.
        posted = self.inner.post([message for message in batch if not isinstance(message, Send)])
        late = [DelayedSend(message, self._due(message)) for message in batch if isinstance(message, Send)]
        return WorkGroup([posted, self._late.post(late)]) if late else posted

    def _due(self, send: Send) -> float:
        return self._slowness.due(send, self._jitter_s * self._chance.random())

    def close(self) -> None:
        self._late.stop(ClosedError("the communicator was closed"))
        super().close()

    def abort(self, cause: BaseException) -> None:
        self._late.stop(cause)
        super().abort(cause)
