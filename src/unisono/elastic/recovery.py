"""Training that continues when ranks die, from the last step that any survivor committed, without losing samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""Most consecutive recoveries without a commit if lost ranks are replaced; otherwise their number is a bound."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Recovery:
    """Recovery of a training loop on the remaining ranks, at an agreed step, with all parts moved to them.

    A step counts when this rank calls `commit`, after the optimizer's step. When a call between ranks fails, `recover`
    creates a communicator of the survivors, and finds the rank with the most committed steps. A step that any survivor
    has committed counts, because its gradients included all ranks, even those that have died since. Ranks that have not
    committed it receive parameters, buffers and optimizer state from one that has. A step that no survivor has
    committed is discarded, and its samples, including the dead ranks', are redistributed.

    Sharded parts (`un.sharding`) need no file either: each commit takes a snapshot of them, and the next rank keeps a
    copy. After a failure all parts return to the last snapshot that any survivor has committed, divided among the new
    ranks.

    Args:
        comm: The communicator that the loop uses; after a recovery, use `recovery.comm`.
        redundancy: For sharded parts: number of following ranks that keep a copy of each rank's shards. That many
            adjacent ranks may die at the same time.
        parts: Parts of the training, under any names. A part with `rebuild` is a sampler (`un.data.PartitionSampler` or
            `GlobalBatchSampler`), and is advanced by each commit; a part with `move_to` (`un.GradientAverager`) moves
            to the new communicator; a part with `state_dict` and `load_state_dict` (a model, an optimizer, a scheduler)
            is synced. A `ShardedModel`, its optimizers, and a `ShardedOptimizer` with its parameters are divided among
            the new ranks. Parts are handled in the order in which they are passed.

    Attributes:
        comm: The current communicator.
        step: Number of committed steps.

    Raises:
        TypeError: A part is of another type.
        ValueError: `redundancy` is not a number of ranks.

    Construction is collective if a part is sharded. Further ranks may die during recovery. On a replacement
    (`comm.is_replacement`, from `launch(..., on_failure="replace")`), the constructor joins the others, which are in
    `recover(size=...)`; afterwards `comm`, `step` and the parts are those of the job.

    Cost: without sharded parts, nothing until a failure; then the rebuild, one small exchange, and one broadcast of the
    state if ranks differ. With sharded parts each commit copies a rank's shards, sends them to `redundancy` ranks, and
    waits for all ranks; memory is 2 + 2 * redundancy times the shards, and twice the unsharded parts. Recovery then
    sends each element at most once, and no rank ever needs the whole model.

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
            # The next call in training fails as well, and its `recover` handles both.
            with suppress(PeerLostError):
                self._snapshots.take(comm)

    def commit(self, samples: int | None = None) -> None:
        """Count the step that this rank has just completed, and advance the samplers.

        Waits for the other ranks only if a part is sharded.

        Args:
            samples: Number of samples that this rank has trained on in this step, such as `len(batch)`, which may be 0.
                Required for a `PartitionSampler`. A `GlobalBatchSampler` advances by one step, whatever the number.

        Raises:
            TypeError: A sampler needs the number of samples.
            CommError: With sharded parts: a rank was lost before all had a snapshot; call `recover`.
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
        """Resume with the survivors (and `grow` newcomers). Collective over them; restart iteration over samplers.

        Call it in the `except CommError` around a step, or on all ranks at the same point to admit newcomers. Ranks
        that die meanwhile are excluded as well.

        Args:
            grow, size, timeout: As for `Communicator.rebuild`.

        Returns:
            The new communicator, also in `comm`.

        Raises:
            CommError: As `Communicator.rebuild` does.
            RuntimeError: On every rank: more ranks died at the same time than there are copies of their shards; or,
                with `size`, ranks have recovered more than ten times in a row without a commit, so the step itself may
                kill them.
        """
        while True:
            self._count_attempt(size)
            self.comm = self.comm.rebuild(grow=grow, size=size, timeout=timeout)
            if self._went_well(self._follow):
                return self.comm
            grow = 0

    def _count_attempt(self, size: int | None) -> None:
        """Raise `RuntimeError` if a step kills ranks repeatedly; otherwise they would be replaced forever."""
        self._attempts = 0 if size is None else self._attempts + 1
        if self._attempts > _MOST_ATTEMPTS:
            raise RuntimeError(
                f"ranks were lost {self._attempts} times in a row before step {self.step + 1} was committed. Find out "
                "what ends them there, such as its data or the memory that it needs, and load a checkpoint"
            )

    def join(self, comm: Communicator | None = None) -> Communicator:
        """Join as a newcomer, while the others are in `recover`.

        Replaces this rank's parameters, buffers and optimizer state with the job's. Parts that communicate (an
        averager, sharded parts), and then this object, must have been created with a communicator of this rank alone,
        such as `un.init("thread")`.

        Args:
            comm: A communicator from `unisono.join`; None if this object was created with one.

        Returns:
            The communicator to use, also in `comm`; a new one if a rank was lost or has left in the meantime.

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
        self.comm = comm or self.comm
        self.step = -1
        if not self._went_well(self._follow):
            return self.recover()
        return self.comm

    def leave(self, *, timeout: Timeout | None = None) -> None:
        """Leave voluntarily after a commit, while the others are in `recover`; closes the communicator.

        Shards that only leaving ranks have are first sent to others, so any number of ranks may leave.

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
        """Return the result of `do`, or False if another rank was lost while it ran."""
        try:
            return do()
        except (PeerLostError, CommTimeoutError):
            return False
        except CommError as error:
            # Torch's errors cannot always be distinguished.
            if type(error) is not CommError:
                raise
            return False

    def _follow(self) -> bool:
        """Agree on the step, and move all parts to the communicator. Return False if ranks have left it."""
        comm = self.comm
        shots = self._snapshots
        serial = 0 if shots is None else shots.serial if shots.has(shots.serial) else -1
        everyone = comm.all_gather_object((serial, self.step, self._samples, self._leaving))
        leaving = [rank for rank, found in enumerate(everyone) if found[3]]
        if leaving:
            if shots:
                shots.hand_over(comm, leaving)
            comm.barrier()
            return self._leaving
        # Among the furthest ranks, the one with the most samples is the best estimate of the dead ranks' progress.
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
        # No rank continues before all have arrived.
        if shots:
            shots.take(comm)
        else:
            comm.barrier()
        return True

    def _sync(self, leader: int, *, behind: bool) -> None:
        """Send the leader's state to all ranks that are behind."""
        state = {name: part.state_dict() for name, part in self._stateful.items()} if self.comm.rank == leader else None
        received = self.comm.broadcast_object(state, src=leader)
        if behind:
            for name, part in self._stateful.items():
                part.load_state_dict(received[name])


_Key = tuple[Any, ...]
"""Name of a part, and keys that lead to a shard in its snapshot."""
_ALIGNMENT = 16


@runtime_checkable
class Sharded(Protocol):
    """Interface of a sharded part."""

    def snapshot(self) -> dict[str, Any]:
        """Return nested dicts with a `TensorShard` for each tensor that is sharded."""

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Load a snapshot with this rank's shards."""

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return this rank's range of the tensor at a path in the snapshot."""


class _Copy:
    """One rank's shards, in one message.

    Args:
        index: For each shard, its key, first element, number of elements, shape of the whole tensor, and dtype.
        memory: Their elements as bytes, each shard aligned to 16.
    """

    def __init__(self, index: list[tuple[_Key, int, int, torch.Size, torch.dtype]], memory: torch.Tensor) -> None:
        self.index = index
        self.memory = memory

    @classmethod
    def of(cls, shards: Mapping[_Key, TensorShard], device: torch.device) -> _Copy:
        """Copy shards."""
        index = [(key, s.start, len(s.local), s.shape, s.local.dtype) for key, s in shards.items()]
        memory = torch.empty(sum(map(_room, shards.values())), dtype=torch.uint8, device=device)
        copied = cls(index, memory)
        for key, place in copied.shards().items():
            place.local.copy_(shards[key].local)
        return copied

    def shards(self) -> dict[_Key, TensorShard]:
        """Return the shards, in the memory of this copy."""
        found = {}
        start = 0
        for key, first, numel, shape, dtype in self.index:
            nbytes = numel * dtype.itemsize
            found[key] = TensorShard(self.memory[start : start + nbytes].view(dtype), first, shape)
            start += _room(found[key])
        return found

    def send(self, comm: Communicator, dst: int) -> None:
        """Send this copy to another rank, which calls `recv`."""
        for message in self._messages():
            comm.send(message.to(comm.device), dst)

    @classmethod
    def recv(cls, comm: Communicator, src: int) -> _Copy:
        """Return a copy that another rank sends with `send`."""
        lengths = torch.zeros(2, dtype=torch.int64, device=comm.device)
        comm.recv(lengths, src)
        index, memory = (torch.empty(n, dtype=torch.uint8, device=comm.device) for n in lengths.tolist())
        comm.recv(index, src)
        comm.recv(memory, src)
        return cls(serialization.decode(bytes(index.cpu().numpy())), memory)

    def shift(self, comm: Communicator, distance: int) -> _Copy:
        """Send to the rank at `distance`, and return the copy from the rank at minus `distance`. Collective."""
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
    """State of all parts at one step.

    Attributes:
        rank, size: This rank, and the number of ranks, at that time.
        rest: State of each part, without its shards.
        copies: Shards of this rank and its neighbours, by rank.
    """

    rank: int
    size: int
    rest: dict[str, Any]
    copies: dict[int, _Copy]


class Snapshots:
    """The last two snapshots, so that the last snapshot that any rank has counted is complete on all ranks.

    Args:
        sharded: Sharded parts.
        whole: The other parts, whose state is rolled back together with these.
        redundancy: Number of neighbours that keep a copy of each rank's shards.

    Attributes:
        serial: Number of the last snapshot known to be complete on all ranks; -1 if there is none.
    """

    def __init__(self, sharded: Mapping[str, Sharded], whole: Mapping[str, Any], redundancy: int) -> None:
        self._sharded = sharded
        self._whole = whole
        self._redundancy = redundancy
        self.forget()

    def forget(self) -> None:
        """Drop all snapshots, because this rank will receive another rank's state."""
        self.serial: int = -1
        self._taken: dict[int, _Snapshot] = {}

    def take(self, comm: Communicator) -> None:
        """Take a snapshot, and send copies to the neighbours; return once all ranks have done so. Collective."""
        self._taken = {serial: taken for serial, taken in self._taken.items() if serial == self.serial}
        shards: dict[_Key, TensorShard] = {}
        rest = {name: _without_shards(part.snapshot(), (name,), shards) for name, part in self._sharded.items()}
        rest |= {name: deepcopy(part.state_dict()) for name, part in self._whole.items()}
        own = _Copy.of(shards, comm.device)
        taken = _Snapshot(comm.rank, comm.size, rest, {comm.rank: own})
        for distance in range(1, min(self._redundancy, comm.size - 1) + 1):
            taken.copies[(comm.rank - distance) % comm.size] = own.shift(comm, distance)
        self._taken[self.serial + 1] = taken
        # A rank that passes the barrier knows that every rank has the snapshot.
        comm.barrier()
        self.serial += 1

    def has(self, serial: int) -> bool:
        """Return whether this rank has the snapshot with this number."""
        return serial in self._taken

    def restore(self, comm: Communicator, serial: int, leader: int) -> None:
        """Return all parts to a snapshot, divided among the ranks of a new communicator. Collective.

        Args:
            comm: The communicator, to which the parts have moved.
            serial: Highest number of a snapshot that any rank has counted.
            leader: A rank with this snapshot, whose state newcomers receive.

        Raises:
            RuntimeError: On every rank: some of the shards exist on no rank.
        """
        mine = self._taken.get(serial)
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
        """Send copies that only leaving ranks have to remaining ranks. Collective.

        Args:
            comm: All ranks.
            leaving: The ranks that are leaving.
        """
        known = comm.all_gather_object({s: (sorted(taken.copies), taken.size) for s, taken in self._taken.items()})
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
                    self._taken[serial].copies[shard].send(comm, dst)
                elif comm.rank == dst:
                    self._taken[serial].copies[shard] = _Copy.recv(comm, src)
        comm.barrier()


def _without_shards(state: Any, path: _Key, shards: dict[_Key, TensorShard]) -> Any:
    """Return a copy of nested dicts without their shards, which are stored in `shards` by path."""
    if not isinstance(state, dict):
        return state.detach().clone() if isinstance(state, torch.Tensor) else deepcopy(state)
    kept = {}
    for key, value in state.items():
        if isinstance(value, TensorShard):
            shards[*path, key] = value
        else:
            kept[key] = _without_shards(value, (*path, key), shards)
    return kept
