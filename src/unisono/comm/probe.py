"""Detection of messages that have arrived, before they are received."""

from __future__ import annotations

from unisono.comm.point_to_point import PointToPointMixin
from unisono.comm.point_to_point_work import PointToPointWork
from unisono.core.call_site import call_site
from unisono.core.staging import Staging
from unisono.core.types import Timeout, Work
from unisono.core.work import Completion, resolve_timeout

__all__ = ["ProbeMixin"]


class ProbeMixin(PointToPointMixin):
    """Probes: probe and iprobe."""

    def probe(self, src: int | None = None, tag: int = 0, *, timeout: Timeout | None = None) -> int:
        """Wait for a message without a posted receive, and return the rank that sent it.

        Does not receive it: the next receive from that rank, of this tag, gets the message.

        Args:
            src: The sender's rank; any rank if None.
            tag: Of the message.
            timeout: Seconds or a `timedelta`; the communicator's if None. It stays usable after a timeout.

        Returns: The sender's rank.

        Raises:
            CommTimeoutError: No message arrived in time.
            ValueError: This backend cannot report which ranks have sent, such as nccl.

        Example:
            >>> def program(comm):
            ...     if comm.rank > 0:
            ...         return comm.send(torch.arange(comm.rank), dst=0)
            ...     for _ in range(comm.size - 1):
            ...         src = comm.probe()
            ...         comm.recv(torch.zeros(src, dtype=torch.int64), src)
            ...     return comm.iprobe()
            >>> un.launch(program, nprocs=3, backend="thread")
            [None, None, None]
        """
        limit = resolve_timeout(timeout, self._engine.options.timeout_s)
        work = self._probed("probe", src, tag)
        try:
            work.wait(limit)
        finally:
            work.cancel()
        return work.source_rank()

    def iprobe(self, src: int | None = None, tag: int = 0) -> int | None:
        """Return the rank that sent a message that has arrived; None if there is none. Otherwise as `probe`.

        Args:
            src, tag: As for `probe`.
        """
        work = self._probed("iprobe", src, tag)
        if not work.is_completed():
            work.cancel()
            return None
        work.wait(0.0)
        return work.source_rank()

    def _probed(self, operation: str, src: int | None, tag: int) -> PointToPointWork:
        self._engine.enter(operation)
        self._check_source(src, tag)
        noted = operation, None, f"tag {tag}", call_site()
        return PointToPointWork(self._engine, noted, (), self._any_source.join(tag, src, _done), Staging())


def _done(_peer: int) -> Work:
    """Return a completed work: a probed message needs no further action."""
    done = Completion(0.0)
    done.complete()
    return done
