"""Gossip averaging: each rank averages with its neighbours only, and all ranks converge to the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unisono.communicator import Communicator
from unisono.core.types import Message, Recv, Send
from unisono.errors import MismatchError
from unisono.gradients.exchanges import StepExchanges
from unisono.gradients.periodic import Schedule, compare
from unisono.gradients.periodic_averager import PeriodicAverager, mean
from unisono.gradients.topology import Neighbours, Topology, mixing
from unisono.gradients.topology import topology as topology_of
from unisono.utils.flatten import buckets, flat_apply
from unisono.utils.parameters import Model

__all__ = ["Gossip", "NeighbourMean"]


class NeighbourMean:
    """Reduction to a weighted mean over a rank and its neighbours; the weights preserve the mean over all ranks.

    Args:
        topology: Function that takes the number of ranks and the round, and returns the neighbours of each rank.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __repr__(self) -> str:
        # Omit the topology from the text that ranks compare. Ranks compare topologies separately: named topologies by
        # name, others by their first round.
        return "NeighbourMean"

    def __call__(self, flat: torch.Tensor, comm: Communicator, turn: int, /) -> None:
        rows = mixing(self.topology(comm.size, turn), comm.size)
        if comm.size > 1 and all(len(row) == comm.size for row in rows):
            mean(flat, comm, turn)
            return
        receivers = [other for other, row in enumerate(rows) if comm.rank in row and other != comm.rank]
        senders = {other: weight for other, weight in rows[comm.rank].items() if other != comm.rank}
        if not senders and not receivers:
            return
        received = {peer: torch.empty(flat.shape, dtype=flat.dtype, device=flat.device) for peer in senders}
        messages: list[Message] = [Recv(buffer, peer) for peer, buffer in received.items()]
        messages += [Send(flat, peer) for peer in receivers]
        comm.batch_isend_irecv(messages)[0].wait()
        # Sum weighted differences instead of weighted values: if all values are equal, the sum is zero and nothing is
        # rounded.
        wide = torch.float32 if flat.is_floating_point() and flat.itemsize < 4 else flat.dtype
        mine = flat.to(wide)
        change = torch.zeros_like(mine)
        for peer, weight in senders.items():
            change.add_(received[peer].to(wide) - mine, alpha=weight)
        flat.copy_(mine + change)


class _GossipExchanges(StepExchanges):
    """Exchanges in which each rank communicates with its neighbours only."""

    def _compare(self, state: Mapping[str, Any]) -> None:
        # Ranks communicate only with neighbours, so no collective can compare their steps and rounds. Average this
        # rank's numbers with its neighbours' numbers: if the average differs from this rank's numbers, a neighbour has
        # different numbers. If numbers differ between ranks that this round connects, directly or through others, at
        # least one of those with the highest numbers notices.
        mine = torch.tensor([state["steps"], state["rounds"]], dtype=torch.float64, device=self._comm.device)
        mixed = mine.clone()
        self._settings.reduce(mixed, self._comm, state["rounds"])
        if not torch.equal(mixed, mine):
            problem = (
                f"rank {self._comm.rank} is at step {state['steps']}, round {state['rounds']}, and a neighbour is not: "
                "they resumed from different states, or one has skipped steps"
            )
            self._comm.abort(problem)
            raise MismatchError(problem, rank=self._comm.rank, size=self._comm.size)


class Gossip(PeriodicAverager):
    """Gossip averaging: mix parameters with a few neighbours, with weights that preserve the mean over all ranks.

    Provisional: it may change in any minor version, without a deprecation.

    No rank waits for all others. Each round moves ranks towards the mean, and preserves the mean itself (up to
    rounding). Finite parameters that are equal on all neighbours do not change, unless all ranks are neighbours (for
    example, two or three ranks on a ring): in that case, the round is an all_reduce, whose result is subject to
    rounding. Method: Lian et al., Can decentralized algorithms outperform centralized algorithms? (D-PSGD, 2017), with
    mixing after the optimizer's step. The "exponential" topology is from Assran et al., Stochastic gradient push
    (2019). Construction is collective over all ranks.

    Args:
        model: A module, or its parameters. Integer parameters remain unchanged.
        comm: Communicator of the ranks that take part.
        topology: "ring", "exponential" (one peer per round, at varying distances), "grid", "complete"; or, for each
            rank, a list of the ranks that it receives from; or a function that takes the number of ranks and the round
            (from 0) and returns such lists, the same on every rank.
        every: Number of steps between rounds, an `every(...)`, or a function of the step's number (from 1).
        overlap_steps, alpha, bucket_cap_mb: As for `PeriodicAverager`. `every=1` with `overlap_steps=1` is D-PSGD as
            published: ranks mix the parameters after step n while they take step n + 1, and then add that step's change
            to the mix.

    Raises:
        MismatchError: Ranks have different parameters or arguments. A round also raises this error if neighbours have
            taken different numbers of steps, or resumed from different steps.
        ValueError: The topology is unknown, does not preserve the mean, or does not connect all ranks.

    Attributes:
        rounds: Number of rounds so far.

    Cost: a round exchanges 16 bytes, and then the parameters, with each neighbour. If all ranks are neighbours, as with
    "complete", a round is an all_reduce.

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

    _by_steps = _GossipExchanges

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        topology: str | Neighbours | Topology = "ring",
        every: int | Schedule = 1,
        *,
        overlap_steps: int = 0,
        alpha: float | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        mixer = NeighbourMean(topology_of(topology, comm.size))
        first = mixing(mixer.topology(comm.size, 0), comm.size)
        self._more_settings = {"topology": topology if isinstance(topology, str) else str(first)}
        super().__init__(
            model,
            comm,
            every,
            reduce=mixer,
            overlap_steps=overlap_steps,
            alpha=alpha,
            bucket_cap_mb=bucket_cap_mb,
        )

    def mix(self) -> None:
        """Run a round now, regardless of the schedule. Every rank must call this.

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
        """Set every rank's parameters to the mean over all ranks, at the end of training. Collective."""
        self.finish()
        compare(self._comm, {"steps": self.steps, "rounds": self.rounds}, type(self).__name__)
        with torch.no_grad():
            for message in buckets(self._tensors(self._fragments[0]), self._exchange_settings.cap):
                # If the collective fails, the parameters must not be left with partial sums.
                flat_apply(message, lambda flat: self._comm.all_reduce(flat, "avg"), keep_on_error=True)
