"""Messages over two transports: those of this host by the inner one, all others by the outer one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.core.call import Call
from unisono.core.transport import Transport
from unisono.core.types import Message, PointToPoint, Work
from unisono.core.work import ChainedWork, WorkGroup
from unisono.errors import CommError
from unisono.wrappers.base import Wrapper

__all__ = ["RankMappedTransport", "Routes"]

_POLL_S = 0.01
_RANKS = re.compile(r"\b(ranks?) (\d+(?:, \d+)*)")


class RankMappedTransport(Wrapper):
    """Transport that reports its ranks in errors by their numbers in a larger group.

    Args:
        inner: The transport.
        ranks: For each of its ranks, the number to report.
    """

    def __init__(self, inner: Transport, ranks: Sequence[int]) -> None:
        super().__init__(inner)
        self.native = inner.native
        self._ranks = tuple(ranks)
        self._cause: BaseException | None = None

    def wrap_child(self, inner: Transport) -> RankMappedTransport:
        return RankMappedTransport(inner, range(inner.size))

    def agree(self, call: Call, deadline: float) -> None:
        try:
            super().agree(call, deadline)
        except CommError as error:
            raise self.translate(error) from error

    def post(self, batch: Sequence[Message]) -> Work:
        return ChainedWork(super().post(batch), translate=self.translate)

    def iprobe(self, peer: int, tag: int) -> bool:
        try:
            return super().iprobe(peer, tag)
        except CommError as error:
            raise self.translate(error) from error

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        # The messages of a call have been translated.
        work = super().run(call, over)
        return ChainedWork(work, translate=self.translate) if call.steps is None else work

    def abort(self, cause: BaseException) -> None:
        self._cause = self._cause or cause
        super().abort(cause)

    def translate(self, error: BaseException) -> BaseException:
        """Return the error with the ranks renumbered."""
        if error is self._cause or not isinstance(error, CommError):
            # The cause of an abort has the numbers of the whole group already.
            return error
        translated = type(error)(_RANKS.sub(self._rename, error.message), nbytes=error.nbytes, waited_s=error.waited_s)
        translated.peer = None if error.peer is None else self._number(error.peer)
        return translated

    def _rename(self, found: re.Match[str]) -> str:
        return f"{found[1]} {', '.join(str(self._number(int(number))) for number in found[2].split(', '))}"

    def _number(self, local_rank: int) -> int:
        return self._ranks[local_rank] if local_rank < len(self._ranks) else local_rank


class Routes:
    """Routing of a rank's messages.

    Args:
        inner: Transport of this host's ranks, or None if this rank is the only one.
        outer: Transport of all ranks, numbered as in the whole group.
        here: The ranks of this host, in the order of `inner`.
        timeout_s: Of a wait without a timeout of its own.
    """

    def __init__(self, inner: Transport | None, outer: Transport, here: Sequence[int], timeout_s: float) -> None:
        self._inner = inner
        self._outer = outer
        self._timeout_s = timeout_s
        self._local_ranks = {rank: local_rank for local_rank, rank in enumerate(here)}

    def post(self, batch: Sequence[Message]) -> Work:
        """As `Transport.post`."""
        near = [m for m in batch if m.peer in self._local_ranks]
        if self._inner is None or not near:
            return self._outer.post(batch)
        inside = self._inner.post([type(m)(m.tensor, self._local_ranks[m.peer], m.tag) for m in near])
        if len(near) == len(batch):
            return inside
        far = [m for m in batch if m.peer not in self._local_ranks]
        return WorkGroup([inside, self._outer.post(far)], self._timeout_s, _POLL_S)

    def iprobe(self, peer: int, tag: int) -> bool:
        """As `Transport.iprobe`."""
        if self._inner is None or peer not in self._local_ranks:
            return self._outer.iprobe(peer, tag)
        return self._inner.iprobe(self._local_ranks[peer], tag)
