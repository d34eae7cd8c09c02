"""Training that continues when ranks die: from the last step that any survivor has committed, with nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from unisono.communicator import Communicator
from unisono.core.types import Timeout
from unisono.data import GlobalBatchSampler
from unisono.elastic.snapshots import Sharded, Snapshots
from unisono.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["Recovery"]


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Recovery:
    """Recovery of a training loop with the remaining ranks: an agreed step, and all that moves to them.

    A step counts when this rank calls `commit`, after the optimizer's step. When a call between ranks fails, `recover`
    creates a communicator of the survivors, and finds the survivor with most committed steps. A step that any
    survivor has committed counts: its gradients were those of all ranks, also of those that died since. Ranks that
    have not committed it receive parameters, buffers and the optimizer's state from a rank that has. A step that no
    survivor has committed is discarded: its samples, those of the dead ranks too, are dealt again.

    Parts that are divided among the ranks (`un.sharding`) need no file either: each commit takes a snapshot of them,
    of which the next rank has a copy. After a failure all parts return to the last snapshot that any survivor has
    committed, divided among the new ranks.

    Args:
        comm: The communicator that the loop uses; afterwards `recovery.comm`.
        redundancy: For sharded parts: number of ranks to the right that have a copy of each rank's shards. That many
            neighbouring ranks may die together.
        parts: Parts of the training, by any name. A part with `rebuild` is a sampler (`un.data.PartitionSampler` or
            `GlobalBatchSampler`), and is advanced by each commit; a part with `move_to` (`un.GradientAverager`) moves
            to the new communicator; a part with `state_dict` and `load_state_dict` (a model, an optimizer, a
            scheduler) is synced. A `ShardedModel`, an optimizer of it, and a `ShardedOptimizer`, which includes its
            parameters, are divided among the new ranks. Parts are treated in the order in which they are passed.

    Attributes:
        comm: The current communicator.
        step: Number of committed steps.

    Raises:
        TypeError: A part is none of these.
        ValueError: `redundancy` is not a number of ranks.

    Collective if a part is sharded. A further death during recovery does no harm.

    Cost: without sharded parts nothing until a failure; then the rebuild, one exchange of numbers, and one broadcast
    of the state if ranks differ. With sharded parts each commit copies the shards of a rank, sends them to
    `redundancy` ranks, and waits for all ranks; memory is 2 + 2 * redundancy times the shards, and twice the parts
    that are not sharded. Recovery then sends each element at most once, and no rank ever needs the whole model.

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     averager = un.GradientAverager(model, comm)
        ...     training = un.elastic.Recovery(comm, model=model, optimizer=optimizer, averager=averager)
        ...     while training.step < 5:
        ...         try:
        ...             if training.comm.size == 3 and training.comm.rank == 1 and training.step == 2:
        ...                 raise KeyError("this rank is gone")
        ...             optimizer.zero_grad()
        ...             model(torch.ones(4, 1)).sum().backward()
        ...             optimizer.step()
        ...             training.commit()
        ...         except un.CommError:
        ...             training.recover()
        ...     return training.comm.size, training.step
        >>> ends = un.launch(program, nprocs=3, backend="thread", on_failure="continue")
        >>> ends[0], ends[2]
        ((2, 5), (2, 5))
    """

    def __init__(self, comm: Communicator, *, redundancy: int = 1, **parts: Any) -> None:
        if not isinstance(redundancy, int) or redundancy < 0:
            raise ValueError(f"redundancy must be a number of ranks, not {redundancy!r}")
        self.comm, self.step = comm, 0
        self._samples, self._leaving = 0, False
        self._samplers = {name: part for name, part in parts.items() if callable(getattr(part, "rebuild", None))}
        rest = {name: part for name, part in parts.items() if name not in self._samplers}
        self._movers = {name: part for name, part in rest.items() if callable(getattr(part, "move_to", None))}
        sharded = {name: part for name, part in rest.items() if isinstance(part, Sharded)}
        rest = {name: part for name, part in rest.items() if name not in self._movers and name not in sharded}
        for name, part in rest.items():
            if not isinstance(part, _Stateful):
                kind = type(part).__name__
                raise TypeError(f"{name} is a {kind}, which has no state_dict and load_state_dict, move_to, or rebuild")
        self._stateful: Mapping[str, _Stateful] = rest
        self._snapshots = Snapshots(sharded, rest, redundancy) if sharded else None
        if self._snapshots:
            # The next call of the training fails as well, and its `recover` is for this one, too.
            with suppress(PeerLostError):
                self._snapshots.take(comm)

    def commit(self, samples: int | None = None) -> None:
        """Count the step, whose parameters this rank now has as all others, and advance the samplers.

        Waits for the other ranks if a part is sharded, and for none otherwise.

        Args:
            samples: Number of samples that this rank has trained on in this step, such as `len(batch)`, which may be 0.
                A `PartitionSampler` needs it. A `GlobalBatchSampler` goes one step on, whatever it is.

        Raises:
            TypeError: A sampler needs the number of samples.
            CommError: A rank was lost before all had a snapshot: call `recover`. With sharded parts only.
        """
        by_samples = [each for each in self._samplers.values() if not isinstance(each, GlobalBatchSampler)]
        if by_samples and samples is None:
            raise TypeError(
                "a PartitionSampler counts samples, not steps. Pass how many this rank trained on: commit(len(batch))"
            )
        if self._snapshots:
            self._snapshots.take(self.comm)
        self.step += 1
        self._samples += samples or 0
        for sampler in self._samplers.values():
            sampler.advance(1 if isinstance(sampler, GlobalBatchSampler) else samples)

    def recover(self, *, grow: int = 0, timeout: Timeout | None = None) -> Communicator:
        """Resume with the survivors (and `grow` newcomers). Collective over them; restart iteration over samplers.

        Call it from the `except CommError` around a step, or on all ranks at one place to admit newcomers. Ranks
        that die meanwhile are left out as well.

        Args:
            grow: As for `Communicator.rebuild`.
            timeout: As for `Communicator.rebuild`.

        Returns:
            The new communicator, also in `comm`.

        Raises:
            CommError: As `Communicator.rebuild` does.
            RuntimeError: More ranks died together than copies of their shards exist; on every rank.
        """
        while True:
            self.comm = self.comm.rebuild(grow=grow, timeout=timeout)
            if self._went_well(self._follow):
                return self.comm
            grow = 0

    def join(self, comm: Communicator | None = None) -> Communicator:
        """Take part as a newcomer, while the others are in `recover`.

        Replaces this rank's parameters, buffers and optimizer state by those of the ranks of the job. Parts that
        communicate (an averager, sharded ones) were made with a communicator of this rank alone, such as
        `un.init("thread")`, as this object then was.

        Args:
            comm: A communicator from `unisono.join`; None if this object was made with it.

        Returns:
            The communicator to use, also in `comm`; a new one if a rank was lost meanwhile, or has left.

        Raises:
            ValueError: A part is sharded, and `comm` is None.
            CommError: As `recover` does.
        """
        if self._snapshots:
            if comm is None:
                raise ValueError(
                    "with sharded parts, create Recovery with un.init('thread'), and pass join() the job's"
                )
            self._snapshots.forget()
        self.comm, self.step = comm or self.comm, -1
        if not self._went_well(self._follow):
            return self.recover()
        return self.comm

    def leave(self, *, timeout: Timeout | None = None) -> None:
        """Leave on purpose, after a commit, while the others are in `recover`; closes the communicator.

        Shards of which only leaving ranks have copies are sent to others first, so any number of ranks may leave.

        Args:
            timeout: As for `Communicator.rebuild`.

        Raises:
            CommError: As `recover` does.

        Example:
            >>> def program(comm):
            ...     sharded = un.sharding.ShardedModel(torch.nn.Linear(3, 1), comm)
            ...     training = un.elastic.Recovery(comm, model=sharded)
            ...     if comm.rank == 1:
            ...         return training.leave()
            ...     return training.recover().size
            >>> un.launch(program, nprocs=3, backend="thread")
            [2, None, 2]
        """
        self._leaving = True
        while True:
            self.comm = self.comm.rebuild(timeout=timeout)
            if self._went_well(self._follow):
                self.comm.close()
                return

    def _went_well(self, do: Callable[[], bool]) -> bool:
        """Return what `do` returns; False if another rank was lost while it ran."""
        try:
            return do()
        except (PeerLostError, CommTimeoutError):
            return False
        except CommError as error:
            # Torch's own errors are not always told apart.
            if type(error) is not CommError:
                raise
            return False

    def _follow(self) -> bool:
        """Agree on the step, and move everything to the communicator. Return False if ranks have left it."""
        comm, shots = self.comm, self._snapshots
        serial = 0 if shots is None else shots.serial if shots.has(shots.serial) else -1
        everyone = comm.all_gather_object((serial, self.step, self._samples, self._leaving))
        leaving = [rank for rank, found in enumerate(everyone) if found[3]]
        if leaving:
            if shots:
                shots.hand_over(comm, leaving)
            comm.barrier()
            return self._leaving
        # Of the furthest ranks, one with most samples: it is the best estimate of the dead ranks' progress.
        progress = [found[:3] for found in everyone]
        leader = progress.index(max(progress))
        serial, step, _ = progress[leader]
        for part in self._movers.values():
            part.move_to(comm)
        if shots:
            shots.restore(comm, serial, leader)
        elif any(found[1] != step for found in progress):
            self._sync(leader, behind=self.step != step)
        self.step, self._samples = step, 0
        for name in sorted(self._samplers):
            self._samplers[name].rebuild(comm, like=leader)
        # No rank goes on before all are here.
        if shots:
            shots.take(comm)
        else:
            comm.barrier()
        return True

    def _sync(self, leader: int, *, behind: bool) -> None:
        """The leader's state, on all that are behind."""
        state = {name: part.state_dict() for name, part in self._stateful.items()} if self.comm.rank == leader else None
        received = self.comm.broadcast_object(state, src=leader)
        if behind:
            for name, part in self._stateful.items():
                part.load_state_dict(received[name])
