"""Comparison of calls between ranks on several hosts before data moves.

Ranks first compare their calls inside each host. Then the first ranks of all hosts compare their hosts' calls, and
broadcast the verdict inside their hosts. A short reduction travels in the same messages, so its result is ready once
all ranks agree.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

from unisono.core import clock
from unisono.core.call import NOTHING_SENT, Call, Fingerprint
from unisono.core.control import ControlPlane, compare_in_full
from unisono.core.group import Group
from unisono.core.tensors import combine_all
from unisono.core.types import PointToPoint, ReduceOp
from unisono.core.work import seconds_left
from unisono.errors import CommError, CommTimeoutError, MismatchError
from unisono.transports.hierarchical.host_links import HostLinks, Packet
from unisono.transports.hierarchical.routing import SubsetCollectives

__all__ = ["HostAgreement"]

_HEAD_BYTES = 16
_DIFFERENT, _AGREED, _LATE = range(3)
_REPORT_S = 2.0
_WITHOUT = bytes(_HEAD_BYTES)
"""Digest that a host sends if its own ranks differ. It matches no other digest."""

_MISSING_RANK_S = 0.5, 5.0
_QUOTE_S = 10.0


class HostAgreement:
    """One group's comparison of calls. Every rank calls the same methods in the same order.

    Args:
        group: All ranks.
        control: This rank's handle to the control plane.
        hosts: Number of hosts.
        inside: Runs collectives among the ranks on this host; None if this rank is alone there.
        links: Links to the other hosts on a host's first rank; None on other ranks.
        here: Index of this host.
        short_bytes: Maximum size of a reduction that travels with the comparison between two hosts; for N hosts, the
            maximum is divided by N - 1.
        timeout_s: Timeout for exchanging the calls in full if they differ.
    """

    def __init__(
        self,
        group: Group,
        control: ControlPlane,
        hosts: int,
        inside: SubsetCollectives | None,
        links: HostLinks | None,
        here: int,
        short_bytes: int,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._control = control
        self._inside = inside
        self._links = links
        self._hosts = hosts
        self._here = here
        self._timeout_s = timeout_s
        self._calls = 0
        self.short_bytes: int = short_bytes // (hosts - 1)
        # A host's first rank needs memory for the other hosts' packets, and for its own host's partial result.
        self._host_rounds = [_HostRound(self.short_bytes) for _ in range(hosts if links is not None else 1)]
        self._own = here if links is not None else 0

    def compare(self, mine: Fingerprint, deadline: float) -> None:
        """Return once all ranks are known to make the same call.

        Raises:
            MismatchError: Ranks make different calls. Raised on every rank; the message quotes the calls.
            CommTimeoutError: A rank has not arrived in time; the message names that rank.
        """
        self._calls += 1
        if mine.sends or mine.receives:
            # Send and receive counts must match for each pair of ranks, which a digest cannot show.
            compare_in_full(self._control, self._group, f"call {self._calls}", mine, seconds_left(deadline))
            return
        self._settle(mine, self._alike(mine, deadline), None, deadline)

    def reduce(self, call: Call, deadline: float) -> None:
        """Compare calls as `compare` does, and use the same messages for an all_reduce of at most `short_bytes`."""
        self._calls += 1
        target = call.outputs[0]
        partial = self._host_rounds[self._own].like(target)
        partial.copy_(target)
        partly = call._replace(inputs=(partial,), outputs=(partial,))
        self._settle(call.fingerprint, self._summed(partly, deadline), partly, deadline)
        target.copy_(self._host_rounds[0].like(target))

    def find_missing_rank(self, error: CommTimeoutError, timeout: float) -> BaseException:
        """Return the error for a wait that timed out; if possible, it names a rank that has not arrived.

        A rank that waits for another host cannot tell which rank of that host is late, so all waiting ranks call this.
        """
        shortest, longest = _MISSING_RANK_S
        try:
            self._control.exchange(
                self._group, f"the consistency check of call {self._calls}", None, min(max(timeout, shortest), longest)
            )
        except CommTimeoutError as named:
            # An error that names no peer is about the control plane itself, so keep the original error.
            return error if named.peer is None else named
        except CommError as first:
            return first
        return error

    # -- within this host ----------------------------------------------------------------------
    def _alike(self, mine: Fingerprint, deadline: float) -> bool:
        """Return whether all ranks on this host make the same call."""
        if self._inside is None:
            return True
        transport = self._inside.transport
        if not transport.checks:
            return self._compared(mine, deadline)
        local = mine._replace(algorithm=f"{mine.algorithm} between hosts", sends=(), receives=())
        try:
            transport.compare(Call("barrier", fingerprint=local, steps=_between_hosts), deadline)
        except MismatchError:
            return False
        return True

    def _summed(self, partly: Call, deadline: float) -> bool:
        """Return whether all ranks on this host make the same call; if so, also reduce their tensors."""
        if self._inside is None:
            return True
        checks = self._inside.transport.checks
        if not checks and not self._compared(partly.fingerprint, deadline):
            return False
        try:
            self._inside(partly, deadline, agrees=checks)
        except MismatchError:
            return False
        return True

    def _compared(self, mine: Fingerprint, deadline: float) -> bool:
        assert self._inside is not None
        own = torch.frombuffer(bytearray(_digest(mine)), dtype=torch.uint8)
        all_of_them = tuple(torch.empty_like(own) for _ in range(self._inside.transport.size))
        self._inside(Call("all_gather", inputs=(own,), outputs=all_of_them), deadline)
        return all(torch.equal(own, other) for other in all_of_them)

    # -- between hosts, and back to their ranks ------------------------------------------------
    def _settle(self, mine: Fingerprint, alike: bool, partly: Call | None, deadline: float) -> None:
        """Compare calls between hosts; broadcast the verdict, and any reduction's result, inside this host."""
        nbytes = 0 if partly is None else partly.outputs[0].nbytes
        first = self._host_rounds[0]
        error: CommTimeoutError | None = None
        first.verdict = _DIFFERENT
        if self._links is not None:
            try:
                if self._swapped(self._links, mine, alike, nbytes, deadline):
                    first.verdict = _AGREED
                    self._combine(partly)
            except CommTimeoutError as late:
                first.verdict = _LATE
                first.late = late.peer or 0
                error = late
        if self._inside is not None and alike:
            message = first.with_header(nbytes)
            given = (message,) if self._links is not None else ()
            # The host's first rank may wait for another host until the deadline, and sends the verdict to this host's
            # ranks only afterwards.
            self._inside(Call("broadcast", inputs=given, outputs=(message,), root=0), deadline + _REPORT_S)
        if first.verdict == _LATE:
            raise error or _late(first.late, deadline)
        if first.verdict != _AGREED:
            patience_s = min(self._timeout_s, _QUOTE_S)
            compare_in_full(self._control, self._group, f"mismatch in call {self._calls}", mine, patience_s)
            raise MismatchError(f"ranks differ in what they are about to do. {NOTHING_SENT}")

    def _swapped(self, links: HostLinks, mine: Fingerprint, alike: bool, nbytes: int, deadline: float) -> bool:
        """Return whether all hosts make the same call."""
        digest = _digest(mine) if alike else _WITHOUT
        packet = Packet(digest, self._host_rounds[self._own].content(nbytes if alike else 0))
        theirs = {
            host: host_round.content(nbytes) for host, host_round in enumerate(self._host_rounds) if host != self._own
        }
        return links.swap(packet, theirs, deadline) and alike

    def _combine(self, partly: Call | None) -> None:
        """Reduce the hosts' partial results. Every host uses the same order, so results are bit-identical."""
        if partly is not None:
            shares = [host_round.like(partly.outputs[0]) for host_round in self._host_rounds]
            combine_all(partly.op or ReduceOp.SUM, shares, shares[0])


class _HostRound:
    """Memory for one packet, accessible as bytes and as tensors: a verdict, and a partial result of a reduction."""

    def __init__(self, nbytes: int) -> None:
        self._memory = bytearray(_HEAD_BYTES + nbytes)
        self._bytes = memoryview(self._memory)
        with torch.inference_mode(mode=False):
            self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    @property
    def verdict(self) -> int:
        """The result of the comparison between hosts."""
        return self._bytes[0]

    @verdict.setter
    def verdict(self, word: int) -> None:
        self._bytes[0] = word

    @property
    def late(self) -> int:
        """The rank that did not arrive."""
        return int.from_bytes(self._bytes[8:_HEAD_BYTES], "little")

    @late.setter
    def late(self, rank: int) -> None:
        self._bytes[8:_HEAD_BYTES] = rank.to_bytes(8, "little")

    def content(self, nbytes: int) -> memoryview:
        return self._bytes[_HEAD_BYTES : _HEAD_BYTES + nbytes]

    def with_header(self, nbytes: int) -> torch.Tensor:
        return self._tensor[: _HEAD_BYTES + nbytes]

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the partial result as a tensor with the length and dtype of `tensor`."""
        return self._tensor[_HEAD_BYTES : _HEAD_BYTES + tensor.nbytes].view(tensor.dtype)


def _late(rank: int, deadline: float) -> CommTimeoutError:
    over_s = max(0.0, clock.now() - deadline)
    return CommTimeoutError(
        f"no message from the host of rank {rank} within the timeout (reported {over_s:.1f} s later by the first "
        f"rank of this host). Is rank {rank} alive and reachable, or did it skip a call?",
        peer=rank,
    )


def _digest(mine: Fingerprint) -> bytes:
    return blake2b(repr(mine.compared()).encode(), digest_size=_HEAD_BYTES).digest()


def _between_hosts(transport: PointToPoint, call: Call, deadline: float) -> None:
    """Placeholder for an algorithm's steps in a call that is only compared inside a host."""
    raise NotImplementedError("the transport of all hosts carries this call out")
