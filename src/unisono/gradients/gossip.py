"""Gossip: each rank averages with its neighbours only, and all converge to the same values."""

from __future__ import annotations

from typing import Any

import torch

from unisono.communicator import Communicator
from unisono.core.types import Message, Recv, Send
from unisono.gradients.periodic import PeriodicAction, Schedule, over_buckets
from unisono.gradients.topology import Neighbours, Topology, mixing, topology
from unisono.utils.parameters import Model

__all__ = ["Gossip"]


class Gossip(PeriodicAction):
    """Gossip averaging: mix parameters with a few neighbours, by weights that keep the mean over all ranks.

    No rank waits for all others. Each round moves ranks towards the mean, which itself stays (up to
    rounding); parameters that are equal already do not change. Method: Lian et al., Can
    decentralized algorithms outperform centralized algorithms? (D-PSGD, 2017), here mixing after the
    optimizer's step; "exponential": Assran et al., Stochastic gradient push (2019). Construction is
    collective over all ranks.

    Args:
        model: A module, or its parameters. Integer parameters stay unchanged.
        comm: The ranks that take part.
        topology: "ring", "exponential" (one peer a round, at changing distances), "grid", "complete"; or
            for each rank a list of the ranks that it receives from; or a function of the number of ranks and
            of the round (from 0) that returns such lists, the same on every rank.
        every: 1, or an `every(...)`, or a function of the step's number (from 1).
        bucket_cap_mb: Size of a message in MiB.

    Raises:
        MismatchError: Ranks have different parameters or arguments.
        ValueError: An unknown topology, or one that does not keep the mean or connect all ranks.

    Attributes:
        rounds: Number of rounds so far.

    Cost: a round sends and receives the parameters' bytes once for each neighbour. "complete" is an all_reduce.

    Example:
        >>> from unisono.gradients.gossip import Gossip
        >>> def program(comm):
        ...     w = torch.full((2,), float(comm.rank))
        ...     gossip = Gossip([w], comm, topology="exponential")
        ...     rounds = []
        ...     for _ in range(2):
        ...         gossip.step()
        ...         rounds.append(w[0].item())
        ...     return rounds
        >>> un.launch(program, 4, "thread")
        [[1.5, 1.5], [0.5, 1.5], [1.5, 1.5], [2.5, 1.5]]
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        topology: str | Neighbours | Topology = "ring",
        every: int | Schedule = 1,
        *,
        bucket_cap_mb: float = 25,
    ) -> None:
        self._cap = bucket_cap_mb
        self.rounds = 0
        self._topology = _topology(topology, comm.size)
        first = mixing(self._topology(comm.size, 0), comm.size)
        shown = topology if isinstance(topology, str) else str(first)
        super().__init__(model, comm, every, settings={"topology": shown, "bucket_cap_mb": bucket_cap_mb})

    def mix(self) -> None:
        """Run a round now, regardless of the schedule. Every rank calls it.

        Example:
            >>> def program(comm):
            ...     w = torch.tensor([4.0 * comm.rank])
            ...     un.gradients.Gossip([w], comm, topology="ring").mix()
            ...     return round(w.item(), 3)
            >>> un.launch(program, 4, "thread")
            [5.333, 4.0, 8.0, 6.667]
        """
        self._now()

    def average(self) -> None:
        """Set the parameters of every rank to the mean of all, for the end of training. Collective."""
        with torch.no_grad():
            over_buckets(self._floating(), self._cap, lambda flat: self._comm.all_reduce(flat, "avg"))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps and rounds."""
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rounds = int(state["rounds"])

    def _act(self) -> None:
        size = self._comm.size
        rank = self._comm.rank
        rows = mixing(self._topology(size, self.rounds), size)
        self.rounds += 1
        if size > 1 and all(len(row) == size for row in rows):
            self.average()
            return
        receivers = [other for other, row in enumerate(rows) if rank in row and other != rank]
        senders = {other: weight for other, weight in rows[rank].items() if other != rank}
        over_buckets(self._floating(), self._cap, lambda flat: self._mix(flat, senders, receivers))

    def _mix(self, flat: torch.Tensor, senders: dict[int, float], receivers: list[int]) -> None:
        if not senders and not receivers:
            return
        received = {peer: torch.empty(flat.shape, dtype=flat.dtype, device=flat.device) for peer in senders}
        messages: list[Message] = [Recv(buffer, peer) for peer, buffer in received.items()]
        messages += [Send(flat, peer) for peer in receivers]
        self._comm.batch_isend_irecv(messages)[0].wait()
        # The sum of weighted differences, not of weighted values: where all are equal it is zero, and nothing rounds.
        wide = torch.float32 if flat.is_floating_point() and flat.itemsize < 4 else flat.dtype
        mine = flat.to(wide)
        change = torch.zeros_like(mine)
        for peer, weight in senders.items():
            change.add_(received[peer].to(wide) - mine, alpha=weight)
        flat.copy_(mine + change)

    def _floating(self) -> list[torch.Tensor]:
        return [t for t in self.tensors if t.is_floating_point() or t.is_complex()]


# The argument of `__init__` has the name that callers know, which hides the function there.
_topology = topology
