"""Recovery after ranks die: training continues from the last step that any survivor committed, and loses no samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from unisono import serialization
from unisono.communicator import Communicator
from unisono.core.tensor_shard import TensorShard
from unisono.core.types import Timeout
from unisono.data import GlobalBatchSampler
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.utils.redistribute import redistribute

__all__ = ["Recovery", "Sharded", "Snapshots"]

_MOST_ATTEMPTS = 10
"""Maximum number of recoveries in a row without a commit, if lost ranks are replaced."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Recovery:
    """Recovery of a training loop: the surviving ranks agree on a step and continue training from its state.

    Call `commit` after each optimizer step. When communication fails, `recover` creates a communicator of the
    survivors, and finds the rank with the most committed steps. A training step that any survivor has committed is
    kept, because its gradients came from all ranks, even those that have died since. Survivors that have committed
    fewer steps receive the parameters, buffers and optimizer state of the rank with the most steps. A step that no
    survivor has committed is discarded, and its samples, including the dead ranks' samples, are redistributed.

    Sharded models and optimizers (`un.sharding`) need no checkpoint file: each commit takes a snapshot of them in
    memory, and copies of each rank's shards are kept on other ranks (see `redundancy`). After a failure, the whole
    training state returns to the last snapshot that any survivor has committed, and the shards are divided among the
    survivors.

    Args:
        comm: The communicator that the training loop uses. After a recovery, the loop must use `recovery.comm`.
        redundancy: Number of ranks after each rank that keep a copy of its shards. Up to `redundancy` adjacent ranks
            may die at the same time.
        parts: The objects that make up the training state, as keyword arguments with any names. An object with a method
            `rebuild` counts as a sampler (`un.data.PartitionSampler` or `GlobalBatchSampler`), and each commit advances
            it. An object with `move_to` (`un.GradientAverager`) moves to the new communicator. An object with
            `state_dict` and `load_state_dict` (a model, an optimizer, a scheduler) is synchronized. A `ShardedModel`,
            its optimizers, and a `ShardedOptimizer` with its parameters are divided among the new ranks. Parts are
            handled in the order in which they are passed.

    Attributes:
        comm: The current communicator.
        step: Number of committed training steps.

    Raises:
        TypeError: A part has none of the methods listed for `parts`.
        ValueError: `redundancy` is negative or not an integer.

    Construction is collective if a part is sharded. Recovery also works if more ranks die while it runs. On a
    replacement rank (`comm.is_replacement`, from `launch(..., on_failure="replace")`), the constructor takes part in
    the recovery that the other ranks run with `recover(size=...)`, and sets `comm`, `step` and the parts to the job's
    current state.

    Cost: without sharded parts, nothing until a failure. The cost of a recovery is the rebuild, one small exchange,
    and, if ranks are at different steps, one broadcast of the state. With sharded parts, each commit copies a rank's
    shards, sends them to `redundancy` ranks, and waits for all ranks. Snapshots take 2 + 2 * redundancy times the
    memory of a rank's shards, and twice the memory of the unsharded parts. A recovery sends each sharded element at
    most once, and no rank ever needs the whole model.

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
        self.comm: Communicator = comm
        self.step: int = 0
        self._samples = 0
        self._leaving = False
        self._attempts = 0
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
        if comm.is_replacement:
            self.join(comm.rebuild())
        elif self._snapshots:
            # Ignore the loss of a rank here: the next collective in training also fails, and the program then calls
            # `recover`.
            with suppress(PeerLostError):
                self._snapshots.take(comm)

    def commit(self, samples: int | None = None) -> None:
        """Count the training step that this rank has just completed, and advance the samplers.

        Waits for the other ranks only if a part is sharded.

        Args:
            samples: Number of samples that this rank has trained on in this step, such as `len(batch)`; may be 0.
                Required for a `PartitionSampler`. A `GlobalBatchSampler` always advances by one step.

        Raises:
            TypeError: `samples` is None, but a sampler needs it.
            CommError: A rank was lost before all ranks had a snapshot of the sharded parts; call `recover`.
        """
        by_samples = [each for each in self._samplers.values() if not isinstance(each, GlobalBatchSampler)]
        if by_samples and samples is None:
            raise TypeError(
                "a PartitionSampler counts samples, not steps. Pass how many this rank trained on: commit(len(batch))"
            )
        if self._snapshots:
            self._snapshots.take(self.comm)
        self.step += 1
        self._attempts = 0
        self._samples += samples or 0
        for sampler in self._samplers.values():
            sampler.advance(1 if isinstance(sampler, GlobalBatchSampler) else samples)

    def recover(self, *, grow: int = 0, size: int | None = None, timeout: Timeout | None = None) -> Communicator:
        """Resume with the survivors and any new ranks. Collective over the survivors.

        Call this in an `except CommError` clause around the training step, or on all ranks at the same point to admit
        new ranks. Ranks that die during the recovery are also excluded. Restart the samplers' iterators afterwards.

        Args:
            grow, size, timeout: As for `Communicator.rebuild`.

        Returns:
            The new communicator, which is also stored in `comm`.

        Raises:
            CommError: As for `Communicator.rebuild`.
            RuntimeError: Some shards are lost, because more adjacent ranks died at the same time than there are copies;
                or `size` was passed, and more than ten recoveries in a row without a commit suggest that the training
                step itself kills ranks. Raised on every rank.
        """
        while True:
            self._attempts = 0 if size is None else self._attempts + 1
            # If lost ranks are replaced, a step that keeps killing them would go on forever.
            if self._attempts > _MOST_ATTEMPTS:
                raise RuntimeError(
                    f"ranks were lost {self._attempts} times in a row before step {self.step + 1} was committed. Find "
                    "out what ends them there, such as its data or the memory that it needs, and load a checkpoint"
                )
            self.comm = self.comm.rebuild(grow=grow, size=size, timeout=timeout)
            if self._went_well():
                return self.comm
            grow = 0

    def join(self, comm: Communicator | None = None) -> Communicator:
        """Join a running job as a new rank, while the job's ranks are in `recover`.

        This rank's parameters, buffers and optimizer state are replaced with the job's. Parts that communicate (an
        averager, sharded parts) and this object must have been created with a communicator that has no other rank, such
        as `un.init("thread")`.

        Args:
            comm: The communicator that `unisono.join` returned; None if this object was created with that communicator.

        Returns:
            The communicator to use, which is also stored in `comm`. It is a new one if another rank was lost, or
            left the job, during the call.

        Raises:
            ValueError: `comm` is None although a part is sharded.
            CommError: As for `recover`.
        """
        if self._snapshots:
            if comm is None:
                raise ValueError(
                    "with sharded parts, create Recovery with un.init('thread'), and pass join() the job's"
                )
            self._snapshots.forget()
        self.comm = comm or self.comm
        self.step = -1
        if not self._went_well():
            return self.recover()
        return self.comm

    def leave(self, *, timeout: Timeout | None = None) -> None:
        """Leave the job after a commit, while the other ranks are in `recover`, and close the communicator.

        Shards that exist only on leaving ranks are first sent to remaining ranks, so any number of ranks may leave.

        Args:
            timeout: As for `Communicator.rebuild`.

        Raises:
            CommError: As for `recover`.

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
            if self._went_well():
                self.comm.close()
                return

    def _went_well(self) -> bool:
        """Return the result of `_follow`, or False if another rank was lost while it ran."""
        try:
            return self._follow()
        except (PeerLostError, CommTimeoutError):
            return False
        except CommError as error:
            # With torch's backends, the loss of a rank may raise a plain `CommError`, because their errors cannot
            # always be distinguished.
            if type(error) is not CommError:
                raise
            return False

    def _follow(self) -> bool:
        """Agree on the step, and move all parts to `comm`. Return False if this rank must rebuild `comm` again."""
        comm = self.comm
        shots = self._snapshots
        serial = 0 if shots is None else shots.serial if shots.serial in shots.taken else -1
        everyone = comm.all_gather_object((serial, self.step, self._samples, self._leaving))
        leaving = [rank for rank, found in enumerate(everyone) if found[3]]
        if leaving:
            if shots:
                shots.hand_over(comm, leaving)
            comm.barrier()
            return self._leaving
        # Of the ranks with the most steps, choose the one with the most samples: its progress is the best estimate of
        # the dead ranks' progress.
        progress = [found[:3] for found in everyone]
        leader = progress.index(max(progress))
        serial, step, _ = progress[leader]
        for part in self._movers.values():
            part.move_to(comm)
        if shots:
            shots.restore(comm, serial, leader)
        elif any(found[1] != step for found in progress):
            self._sync(leader, behind=self.step != step)
        self.step = step
        self._samples = 0
        for name in sorted(self._samplers):
            self._samplers[name].rebuild(comm, like=leader)
        # No rank continues before all ranks have recovered.
        if shots:
            shots.take(comm)
        else:
            comm.barrier()
        return True

    def _sync(self, leader: int, *, behind: bool) -> None:
        """Send the leader's state to all ranks that have committed fewer steps."""
        state = {name: part.state_dict() for name, part in self._stateful.items()} if self.comm.rank == leader else None
        received = self.comm.broadcast_object(state, src=leader)
        if behind:
            for name, part in self._stateful.items():
                part.load_state_dict(received[name])


_Key = tuple[Any, ...]
"""Path of a shard: the name of a part, and the keys that lead to the shard in the part's snapshot."""
_ALIGNMENT = 16


@runtime_checkable
class Sharded(Protocol):
    """Interface of a training object whose state is sharded."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state as nested dicts, with a `TensorShard` for each sharded tensor."""

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Load a snapshot that contains this rank's shards."""

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return this rank's element range of the tensor at a path in the snapshot."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copy of one rank's shards, in a single buffer that can be sent as one message.

    Attributes:
        index: For each shard: its key, the index of its first element, its number of elements, the shape of the whole
            tensor, and its dtype.
        memory: The shards' elements as bytes; each shard is aligned to 16 bytes.
    """

    index: list[tuple[_Key, int, int, torch.Size, torch.dtype]]
    memory: torch.Tensor

    @classmethod
    def of(cls, shards: Mapping[_Key, TensorShard], device: torch.device) -> _Copy:
        """Copy shards into a new buffer."""
        index = [(key, s.start, len(s.local), s.shape, s.local.dtype) for key, s in shards.items()]
        memory = torch.empty(sum(map(_room, shards.values())), dtype=torch.uint8, device=device)
        copied = cls(index, memory)
        for key, place in copied.shards().items():
            place.local.copy_(shards[key].local)
        return copied

    def shards(self) -> dict[_Key, TensorShard]:
        """Return the shards as views of this copy's buffer."""
        found = {}
        start = 0
        for key, first, numel, shape, dtype in self.index:
            nbytes = numel * dtype.itemsize
            found[key] = TensorShard(self.memory[start : start + nbytes].view(dtype), first, shape)
            start += _room(found[key])
        return found

    def send(self, comm: Communicator, dst: int) -> None:
        """Send this copy to a rank that calls `recv`."""
        for message in self._messages():
            comm.send(message.to(comm.device), dst)

    @classmethod
    def recv(cls, comm: Communicator, src: int) -> _Copy:
        """Receive a copy that another rank sends with `send`."""
        lengths = torch.zeros(2, dtype=torch.int64, device=comm.device)
        comm.recv(lengths, src)
        index, memory = (torch.empty(n, dtype=torch.uint8, device=comm.device) for n in lengths.tolist())
        comm.recv(index, src)
        comm.recv(memory, src)
        return cls(serialization.decode(bytes(index.cpu().numpy())), memory)

    def shift(self, comm: Communicator, distance: int) -> _Copy:
        """Send this copy to rank + `distance`, and return the copy received from rank - `distance`. Collective."""
        to = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        lengths, index, memory = (message.to(comm.device) for message in self._messages())
        other = torch.zeros_like(lengths)
        comm.sendrecv(lengths, to[0], other, to[1])
        found = [torch.empty(n, dtype=torch.uint8, device=comm.device) for n in other.tolist()]
        for mine, theirs in zip((index, memory), found, strict=True):
            comm.sendrecv(mine, to[0], theirs, to[1])
        return _Copy(serialization.decode(bytes(found[0].cpu().numpy())), found[1])

    def _messages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        index = torch.frombuffer(bytearray(serialization.encode(self.index)), dtype=torch.uint8)
        return torch.tensor([len(index), len(self.memory)]), index, self.memory


def _room(shard: TensorShard) -> int:
    return -(-shard.local.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Snapshot:
    """State of all parts at one training step.

    Attributes:
        rank, size: This process's rank, and the number of ranks, when the snapshot was taken.
        rest: State of each part, without shards.
        copies: Shards of this rank and of its neighbours; the key is the rank.
    """

    rank: int
    size: int
    rest: dict[str, Any]
    copies: dict[int, _Copy]


class Snapshots:
    """The last two snapshots. Two are kept: a rank may be lost before all ranks know that the last one is complete.

    Args:
        sharded: Sharded parts.
        whole: The unsharded parts, whose state is rolled back together with the sharded parts.
        redundancy: Number of ranks after each rank that keep a copy of its shards.

    Attributes:
        serial: Number of the last snapshot known to be complete on all ranks; -1 if there is none.
        taken: The snapshots that this rank has, by number.
    """

    def __init__(self, sharded: Mapping[str, Sharded], whole: Mapping[str, Any], redundancy: int) -> None:
        self._sharded = sharded
        self._whole = whole
        self._redundancy = redundancy
        self.forget()

    def forget(self) -> None:
        """Drop all snapshots, because this rank will receive another rank's state."""
        self.serial: int = -1
        self.taken: dict[int, _Snapshot] = {}

    def take(self, comm: Communicator) -> None:
        """Take a snapshot, send copies to the neighbours, and wait until all ranks have done the same. Collective."""
        self.taken = {serial: taken for serial, taken in self.taken.items() if serial == self.serial}
        shards: dict[_Key, TensorShard] = {}
        rest = {name: _without_shards(part.snapshot(), (name,), shards) for name, part in self._sharded.items()}
        rest |= {name: deepcopy(part.state_dict()) for name, part in self._whole.items()}
        own = _Copy.of(shards, comm.device)
        taken = _Snapshot(comm.rank, comm.size, rest, {comm.rank: own})
        for distance in range(1, min(self._redundancy, comm.size - 1) + 1):
            taken.copies[(comm.rank - distance) % comm.size] = own.shift(comm, distance)
        self.taken[self.serial + 1] = taken
        # After the barrier, every rank has the snapshot.
        comm.barrier()
        self.serial += 1

    def restore(self, comm: Communicator, serial: int, leader: int) -> None:
        """Restore all parts from a snapshot, and divide the shards among the ranks of a new communicator. Collective.

        Args:
            comm: The new communicator; the parts have already moved to it.
            serial: Number of the newest snapshot that any rank knows to be complete.
            leader: A rank that has this snapshot; new ranks receive its state.

        Raises:
            RuntimeError: No rank has a copy of some shards. Raised on every rank.
        """
        mine = self.taken.get(serial)
        known = comm.all_gather_object((sorted(mine.copies), mine.size) if mine else None)
        self._check_complete(known, known[leader])
        rest: dict[str, Any] = mine.rest if mine else {}
        like = {key: (shape, dtype) for key, _, _, shape, dtype in mine.copies[mine.rank].index} if mine else {}
        if None in known:
            received = comm.broadcast_object((rest, like) if comm.rank == leader else None, src=leader)
            rest, like = (rest, like) if mine else received
        held: dict[_Key, list[TensorShard]] = {}
        for copy in mine.copies.values() if mine else ():
            for key, shard in copy.shards().items():
                held.setdefault(key, []).append(shard)
        wanted = {key: (*self._sharded[key[0]].shard_range(key[1:]), *what) for key, what in like.items()}
        states = deepcopy(rest)
        for key, shard in redistribute(held, wanted, comm).items():
            inner = states
            for step in key[:-1]:
                inner = inner[step]
            inner[key[-1]] = shard
        for name, part in self._sharded.items():
            part.restore(states[name])
        for name, part in self._whole.items():
            part.load_state_dict(states[name])
        self.serial = serial

    def _check_complete(
        self, known: Sequence[tuple[list[int], int] | None], leaders: tuple[list[int], int] | None
    ) -> None:
        if leaders is None:
            raise RuntimeError("a rank died before all ranks had a first snapshot. Start the training again")
        size = leaders[1]
        lost = set(range(size)).difference(*(found[0] for found in known if found))
        if lost:
            raise RuntimeError(
                f"the shards of ranks {sorted(lost)} of {size} are lost: these ranks are gone, and so are the "
                f"{self._redundancy} to the right of each that had copies. Load a checkpoint, or pass a higher "
                "redundancy to Recovery"
            )

    def hand_over(self, comm: Communicator, leaving: Sequence[int]) -> None:
        """Send the remaining ranks the copies that exist only on leaving ranks. Collective.

        Args:
            comm: Communicator of the leaving and the remaining ranks.
            leaving: The ranks that are leaving.
        """
        known = comm.all_gather_object({s: (sorted(taken.copies), taken.size) for s, taken in self.taken.items()})
        for serial in sorted({serial for each in known for serial in each}):
            have = {rank: each[serial] for rank, each in enumerate(known) if serial in each}
            staying = [rank for rank in have if rank not in leaving]
            for shard in range(next(iter(have.values()))[1]):
                holders = [rank for rank, (copies, _) in have.items() if shard in copies]
                if not staying or not holders or set(holders) & set(staying):
                    continue
                src = holders[0]
                dst = staying[shard % len(staying)]
                if comm.rank == src:
                    self.taken[serial].copies[shard].send(comm, dst)
                elif comm.rank == dst:
                    self.taken[serial].copies[shard] = _Copy.recv(comm, src)


def _without_shards(state: Any, path: _Key, shards: dict[_Key, TensorShard]) -> Any:
    """Return a copy of nested dicts without the shards, and store each shard in `shards` under its path."""
    if not isinstance(state, dict):
        return state.detach().clone() if isinstance(state, torch.Tensor) else deepcopy(state)
    kept = {}
    for key, value in state.items():
        if isinstance(value, TensorShard):
            shards[*path, key] = value
        else:
            kept[key] = _without_shards(value, (*path, key), shards)
    return kept
