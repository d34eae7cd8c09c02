"""Training that continues when ranks die: from the last step that any survivor has committed, with nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from unisono.communicator import Communicator
from unisono.core.types import Timeout
from unisono.data import GlobalBatchSampler
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

    Args:
        comm: The communicator that the loop uses; afterwards `recovery.comm`.
        parts: Parts of the training, by any name. A part with `rebuild` is a sampler (`un.data.PartitionSampler` or
            `GlobalBatchSampler`), and is advanced by each commit; a part with `move_to` (`un.GradientAverager`) moves
            to the new communicator; a part with `state_dict` and `load_state_dict` (a model, an optimizer, a
            scheduler) is synced.

    Attributes:
        comm: The current communicator.
        step: Number of committed steps.

    Raises:
        TypeError: A part is none of these.

    Cost: nothing until a failure; then the rebuild, one exchange of numbers, and one broadcast of the state
    if ranks differ. The state is received whole before anything is changed, so a further death does no harm.

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

    def __init__(self, comm: Communicator, **parts: Any) -> None:
        self.comm, self.step = comm, 0
        self._samples = 0
        self._samplers = {name: part for name, part in parts.items() if callable(getattr(part, "rebuild", None))}
        rest = {name: part for name, part in parts.items() if name not in self._samplers}
        self._movers = {name: part for name, part in rest.items() if callable(getattr(part, "move_to", None))}
        rest = {name: part for name, part in rest.items() if name not in self._movers}
        for name, part in rest.items():
            if not isinstance(part, _Stateful):
                kind = type(part).__name__
                raise TypeError(f"{name} is a {kind}, which has no state_dict and load_state_dict, move_to, or rebuild")
        self._stateful: Mapping[str, _Stateful] = rest

    def commit(self, samples: int | None = None) -> None:
        """Count the step, whose parameters this rank now has as all others, and advance the samplers. Never waits.

        Args:
            samples: Number of samples that this rank has trained on in this step, such as `len(batch)`, which may be 0.
                A `PartitionSampler` needs it. A `GlobalBatchSampler` goes one step on, whatever it is.

        Raises:
            TypeError: A sampler needs the number of samples.
        """
        by_samples = [each for each in self._samplers.values() if not isinstance(each, GlobalBatchSampler)]
        if by_samples and samples is None:
            raise TypeError(
                "a PartitionSampler counts samples, not steps. Pass how many this rank trained on: commit(len(batch))"
            )
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
        """
        while True:
            self.comm = self.comm.rebuild(grow=grow, timeout=timeout)
            if self._went_well(self._follow):
                return self.comm
            grow = 0

    def join(self) -> Communicator:
        """Take part as a newcomer, with a communicator from `unisono.join`, while the others are in `recover`.

        Replaces this rank's parameters, buffers and optimizer state by those of the ranks of the job.

        Returns:
            The communicator to use, also in `comm`; a new one if a rank was lost meanwhile.

        Raises:
            CommError: As `recover` does.
        """
        self.step = -1
        if not self._went_well(self._follow):
            return self.recover()
        return self.comm

    def _went_well(self, do: Callable[[], None]) -> bool:
        """Return whether no other rank was lost while `do` ran."""
        try:
            do()
        except (PeerLostError, CommTimeoutError):
            return False
        except CommError as error:
            # Torch's own errors are not always told apart.
            if type(error) is not CommError:
                raise
            return False
        return True

    def _follow(self) -> None:
        """Agree on the step, sync the ranks that are behind, and move everything to the communicator."""
        comm = self.comm
        progress = comm.all_gather_object((self.step, self._samples))
        # Of the furthest ranks, one with most samples: it is the best estimate of the dead ranks' progress.
        leader = progress.index(max(progress))
        steps = [step for step, _ in progress]
        if min(steps) != steps[leader]:
            self._sync(leader, behind=self.step != steps[leader])
            self.step = steps[leader]
        self._samples = 0
        for name in sorted(self._samplers):
            self._samplers[name].rebuild(comm, like=leader)
        for name in sorted(self._movers):
            self._movers[name].move_to(comm)
        # No rank goes on before all are here.
        comm.barrier()

    def _sync(self, leader: int, *, behind: bool) -> None:
        """The leader's state, on all that are behind."""
        state = {name: part.state_dict() for name, part in self._stateful.items()} if self.comm.rank == leader else None
        received = self.comm.broadcast_object(state, src=leader)
        if behind:
            for name, part in self._stateful.items():
                part.load_state_dict(received[name])
