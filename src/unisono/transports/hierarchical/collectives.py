"""Collectives on long messages across several hosts, in which data crosses the network only once.

An all_reduce of S bytes is a reduce-scatter inside each host, an all-reduce of each share with the peers on the other
hosts, and an all-gather inside each host (as Mikami et al., arXiv:1811.05233, do on a torus of GPUs). Each of N hosts
sends 2(N-1)/N S over its link. A ring over all p ranks would send 2(p-1)/p S: with two hosts of two ranks, 1.5 S
instead of S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch

from unisono.collectives.executor import even_edges
from unisono.core.call import Call
from unisono.core.threads import SerialWorker
from unisono.core.transport import Transport
from unisono.core.work import Completion, raised_by, seconds_left
from unisono.errors import ClosedError
from unisono.transports.hierarchical.routing import SubsetCollectives, SubsetTransport

__all__ = ["HierarchicalCollectives"]

_AHEAD = 1
"""Number of tiles in flight between hosts while the next one is reduced inside a host."""
_PARTS = 4
_REPORT_S = 5.0


class HierarchicalCollectives:
    """One group's collectives on long messages. All ranks must have agreed on a call before they run it here.

    reduce_scatter and all_gather need the same number of ranks on every host; the other collectives don't.

    Carriers are the ranks that move data between hosts: the first n ranks of each host, where n is the number of ranks
    on the smallest host. The peers of a host's k-th rank are the k-th ranks of the other hosts.

    Args:
        outer: Transport among all ranks.
        inside: Runs collectives among the ranks on this host; None if this rank is alone there.
        rail: Transport among this rank and its peers on the other hosts; None if this rank is not a carrier.
        hosts: For each host, its ranks.
        chunk_bytes: Maximum size of an algorithm's messages.

    Attributes:
        worker: Thread that exchanges tiles between hosts. The owner ends it.
    """

    def __init__(
        self,
        outer: Transport,
        inside: SubsetCollectives | None,
        rail: Transport | None,
        hosts: Sequence[Sequence[int]],
        chunk_bytes: int,
    ) -> None:
        self._outer = outer
        self._inside = inside
        self._hosts = hosts
        self._chunk_bytes = chunk_bytes
        self.worker: SerialWorker = SerialWorker("unisono between hosts")
        rank = outer.rank
        self._here = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        self._local_rank = hosts[self._here].index(rank)
        self._carriers = min(len(ranks) for ranks in hosts)
        # Split tiles into smaller messages, so that the last reduction of a tile barely delays the next tile.
        self._rail = SubsetCollectives(rail, max(1, chunk_bytes // _PARTS)) if rail is not None else None
        self._across: dict[tuple[int, ...], SubsetCollectives] = {}

    # -- all_reduce ----------------------------------------------------------------------------
    def all_reduce(self, call: Call, deadline: float) -> None:
        """Reduce tile by tile: while one tile is in flight between hosts, the next is reduced inside the host."""
        tensor = call.outputs[0]
        usual = self._carriers * self._chunk_bytes // tensor.element_size()
        tiles = tensor.split(_tiles(tensor.numel(), max(1, usual)))
        if self._inside is None or len(tiles) == 1:
            for tile in tiles:
                share = self._scattered(call, tile, deadline)
                self._exchange(call, share, deadline)
                self._gathered(tile, share, deadline)
            return
        ahead: deque[tuple[torch.Tensor, torch.Tensor, Completion]] = deque()
        for tile in tiles:
            share = self._scattered(call, tile, deadline)
            ahead.append((tile, share, self._start_exchange(call, share, deadline)))
            if len(ahead) > _AHEAD:
                self._finish(*ahead.popleft(), deadline)
        while ahead:
            self._finish(*ahead.popleft(), deadline)

    def _start_exchange(self, call: Call, share: torch.Tensor, deadline: float) -> Completion:
        """Exchange a share in the background, after all earlier shares."""
        exchanged = Completion(0.0)
        inference = torch.is_inference_mode_enabled()

        def exchange() -> None:
            with torch.no_grad(), torch.inference_mode(inference):
                exchanged.complete(raised_by(lambda: self._exchange(call, share, deadline)))

        if not self.worker.run(exchange):
            # Don't wait for an exchange that may never run.
            raise ClosedError("the communicator is closed")
        return exchanged

    def _finish(self, tile: torch.Tensor, share: torch.Tensor, exchanged: Completion, deadline: float) -> None:
        # The exchange enforces the deadline itself, so wait long enough for it to report a timeout.
        exchanged.wait(seconds_left(deadline) + _REPORT_S)
        self._gathered(tile, share, deadline)

    def _shares(self, tile: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a tile into the shares that a host's ranks reduce. Only the shares of carriers have elements."""
        edges = even_edges(tile.numel(), self._carriers)
        edges += [edges[-1]] * (len(self._hosts[self._here]) - self._carriers)
        return tuple(tile[low:high] for low, high in pairwise(edges))

    def _scattered(self, call: Call, tile: torch.Tensor, deadline: float) -> torch.Tensor:
        """Reduce-scatter a tile inside the host; return this rank's share."""
        if self._inside is None:
            return tile
        shares = self._shares(tile)
        share = torch.empty_like(shares[self._local_rank])
        inner = Call("reduce_scatter", inputs=shares, outputs=(share,), op=call.op)
        self._inside(inner, deadline)
        return share

    def _exchange(self, call: Call, share: torch.Tensor, deadline: float) -> None:
        """All-reduce this rank's share with its peers on the other hosts, in place."""
        if self._rail is not None and share.numel():
            self._rail(Call("all_reduce", inputs=(share,), outputs=(share,), op=call.op), deadline)

    def _gathered(self, tile: torch.Tensor, share: torch.Tensor, deadline: float) -> None:
        if self._inside is not None:
            self._inside(Call("all_gather", inputs=(share,), outputs=self._shares(tile), packed=tile), deadline)

    # -- the other collectives -----------------------------------------------------------------
    def broadcast(self, call: Call, deadline: float) -> None:
        """Broadcast to one rank on each host, and from that rank to the other ranks on its host."""
        root = _root(call)
        one = self._one_each(root)
        if self._outer.rank in one:
            self._between(one)(_moved(call, one.index(root), root == self._outer.rank), deadline)
        if self._inside is not None:
            source = self._hosts[self._here].index(one[self._here])
            self._inside(_moved(call, source, source == self._local_rank), deadline)

    def reduce(self, call: Call, deadline: float) -> None:
        """Reduce to one rank on each host, and from these ranks to the root."""
        root = _root(call)
        tensor = call.inputs[0]
        one = self._one_each(root)
        if self._inside is not None:
            into = self._hosts[self._here].index(one[self._here])
            outputs = (tensor,) if into == self._local_rank else ()
            self._inside(Call("reduce", inputs=(tensor,), outputs=outputs, op=call.op, root=into), deadline)
        if self._outer.rank in one:
            outputs = (tensor,) if root == self._outer.rank else ()
            inner = Call("reduce", inputs=(tensor,), outputs=outputs, op=call.op, root=one.index(root))
            self._between(one)(inner, deadline)

    def _one_each(self, root: int) -> tuple[int, ...]:
        """Return one rank per host: the root on its own host, and the first rank on every other host."""
        return tuple(root if root in ranks else ranks[0] for ranks in self._hosts)

    def _between(self, ranks: tuple[int, ...]) -> SubsetCollectives:
        if ranks not in self._across:
            self._across[ranks] = SubsetCollectives(SubsetTransport(self._outer, ranks), self._chunk_bytes)
        return self._across[ranks]

    def all_gather(self, call: Call, deadline: float) -> None:
        """All-gather between this rank and its peers on the other hosts, then inside each host."""
        assert self._rail is not None
        assert self._inside is not None
        rail = tuple(call.outputs[ranks[self._local_rank]] for ranks in self._hosts)
        self._rail(Call("all_gather", inputs=call.inputs, outputs=rail), deadline)
        for ranks in self._hosts:
            outputs = tuple(call.outputs[rank] for rank in ranks)
            self._inside(Call("all_gather", inputs=(outputs[self._local_rank],), outputs=outputs), deadline)

    def reduce_scatter(self, call: Call, deadline: float) -> None:
        """Reduce-scatter inside this host, one host's part after another, then with the peers on the other hosts."""
        assert self._rail is not None
        assert self._inside is not None
        lengths = [call.inputs[ranks[self._local_rank]].numel() for ranks in self._hosts]
        partly = call.outputs[0].new_empty(sum(lengths))
        rail = partly.split(lengths)
        for ranks, share in zip(self._hosts, rail, strict=True):
            inputs = tuple(call.inputs[rank] for rank in ranks)
            self._inside(Call("reduce_scatter", inputs=inputs, outputs=(share,), op=call.op), deadline)
        self._rail(Call("reduce_scatter", inputs=rail, outputs=call.outputs, op=call.op), deadline)


def _tiles(count: int, usual: int) -> list[int]:
    """Return each tile's number of elements. The first and last tiles are smaller, because less work overlaps there.

    Example:
        >>> _tiles(100, 16)
        [4, 8, 16, 32, 20, 10, 5, 4, 1]
    """
    least = max(1, usual // 4)
    size = max(1, usual // 4)
    left = count
    found = []
    while left:
        found.append(min(size, max(least, left // 2), left))
        left -= found[-1]
        size = min(2 * size, 2 * usual)
    return found


def _root(call: Call) -> int:
    assert call.root is not None
    return call.root


def _moved(call: Call, root: int, here: bool) -> Call:
    """Return a broadcast of the same tensor among some of the ranks, with `root` numbered among them."""
    target = call.outputs[0]
    return Call("broadcast", inputs=(target,) if here else (), outputs=(target,), root=root)
