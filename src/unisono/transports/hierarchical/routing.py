"""Transports that translate rank numbers between a group and its subsets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unisono.collectives.selection import Selection
from unisono.core.call import Call
from unisono.core.failure import with_notes_of
from unisono.core.group import Group
from unisono.core.transport import Transport, share_capabilities
from unisono.core.types import Message, PointToPoint, Work
from unisono.core.work import ChainedWork, seconds_left
from unisono.errors import CommError
from unisono.wrappers.base import Wrapper

__all__ = ["RankMappedTransport", "SubsetCollectives", "SubsetTransport"]

_RANKS = re.compile(r"\b(ranks?) (\d+(?:, \d+)*)")


class RankMappedTransport(Wrapper):
    """Wrapper that renumbers the ranks in a transport's errors, to match a larger group.

    Args:
        inner: The transport.
        ranks: For each rank of the transport, its number in the larger group.
    """

    def __init__(self, inner: Transport, ranks: Sequence[int]) -> None:
        super().__init__(inner)
        self.native: frozenset[str] = inner.native
        self._ranks = tuple(ranks)
        self._cause: BaseException | None = None

    def wrap_child(self, inner: Transport) -> RankMappedTransport:
        return RankMappedTransport(inner, range(inner.size))

    def post(self, batch: Sequence[Message]) -> Work:
        return ChainedWork(super().post(batch), translate=self.translate)

    def iprobe(self, peer: int, tag: int) -> bool:
        try:
            return super().iprobe(peer, tag)
        except CommError as error:
            raise self.translate(error) from error

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        # Don't translate the errors of a call with `steps`: it consists of messages, whose errors `post` translates.
        work = super().run(call, over)
        return ChainedWork(work, translate=self.translate) if call.steps is None else work

    def abort(self, cause: BaseException) -> None:
        self._cause = self._cause or cause
        super().abort(cause)

    def translate(self, error: BaseException) -> BaseException:
        """Return the error with its ranks renumbered."""
        if error is self._cause or not isinstance(error, CommError):
            # Don't translate the cause of an abort, which already uses the whole group's rank numbers.
            return error
        translated = type(error)(_RANKS.sub(self._rename, error.message), nbytes=error.nbytes, waited_s=error.waited_s)
        translated.peer = None if error.peer is None else self._number(error.peer)
        return with_notes_of(error, translated)

    def _rename(self, found: re.Match[str]) -> str:
        return f"{found[1]} {', '.join(str(self._number(int(number))) for number in found[2].split(', '))}"

    def _number(self, local_rank: int) -> int:
        return self._ranks[local_rank] if local_rank < len(self._ranks) else local_rank


class SubsetTransport(Transport):
    """Transport for a subset of another transport's ranks, renumbered from 0. Supports only messages.

    Args:
        base: The other transport.
        ranks: Ranks of `base`, including the caller; their order gives the new numbers.
    """

    def __init__(self, base: Transport, ranks: Sequence[int]) -> None:
        self._base = base
        self._ranks = tuple(ranks)
        self.group: Group = base.group.child("some", self._ranks)
        share_capabilities(self, base, "latency_s", "second_per_byte", "devices", "host_staged")

    def post(self, batch: Sequence[Message]) -> Work:
        return self._base.post([type(m)(m.tensor, self._ranks[m.peer], m.tag) for m in batch])

    def split(self, group: Group) -> Transport:
        raise NotImplementedError("split the transport that these ranks are part of, not this view of it")

    def close(self) -> None:
        """Do nothing: the base transport is closed by its owner."""

    def abort(self, cause: BaseException) -> None:
        """Do nothing: the base transport is aborted by its owner."""


class SubsetCollectives:
    """Runs one collective at a time among a subset of a group's ranks, directly on the caller's memory.

    Args:
        transport: Transport among the participating ranks.
        chunk_bytes: Maximum size of an algorithm's messages.
    """

    def __init__(self, transport: Transport, chunk_bytes: int) -> None:
        self._transport = transport
        self._selection = Selection(transport, chunk_bytes)

    def __call__(self, call: Call, deadline: float) -> None:
        """Run a collective; return when this rank's part is done. An in-place reduction also overwrites its inputs.

        Args:
            call: The call, still without `steps`: this method chooses the algorithm.
            deadline: Deadline on the library's clock.
        """
        _, steps = self._selection.choose(call)
        chosen = call._replace(steps=steps, timeout=seconds_left(deadline))
        self._transport.run(chosen).wait(seconds_left(deadline))
