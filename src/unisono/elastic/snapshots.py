"""Snapshots of the parts of a training whose state is spread over ranks, with copies at neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from unisono import serialization
from unisono.communicator import Communicator
from unisono.core.tensor_shard import TensorShard
from unisono.utils.redistribute import redistribute

__all__ = ["Sharded", "Snapshots"]

_Key = tuple[Any, ...]
"""Name of a part, and the keys that lead to a shard in its snapshot."""
_ALIGNMENT = 16


@runtime_checkable
class Sharded(Protocol):
    """A part of which each rank has shards."""

    def snapshot(self) -> dict[str, Any]:
        """Return nested dicts with a `TensorShard` for each tensor that is spread over ranks."""

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Load a snapshot whose shards are those of this rank."""

    def shard_range(self, path: Sequence[Any]) -> tuple[int, int]:
        """Return which elements this rank has of the tensor at a path in the snapshot."""


class _Copy:
    """Shards of one rank, in one message.

    Args:
        index: For each shard its key, first element, number of elements, shape of the whole tensor, and dtype.
        memory: Their elements as bytes, each shard's from a multiple of 16 on.
    """

    def __init__(self, index: list[tuple[_Key, int, int, torch.Size, torch.dtype]], memory: torch.Tensor) -> None:
        self.index, self.memory = index, memory

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
        found, start = {}, 0
        for key, first, numel, shape, dtype in self.index:
            nbytes = numel * dtype.itemsize
            found[key] = TensorShard(self.memory[start : start + nbytes].view(dtype), first, shape)
            start += _room(found[key])
        return found

    def send(self, comm: Communicator, dst: int) -> None:
        """Send to another rank, which calls `recv`."""
        for message in self._messages():
            comm.send(message.to(comm.device), dst)

    @classmethod
    def recv(cls, comm: Communicator, src: int) -> _Copy:
        """Return what another rank sends by `send`."""
        lengths = torch.zeros(2, dtype=torch.int64, device=comm.device)
        comm.recv(lengths, src)
        index, memory = (torch.empty(n, dtype=torch.uint8, device=comm.device) for n in lengths.tolist())
        comm.recv(index, src)
        comm.recv(memory, src)
        return cls(serialization.decode(bytes(index.cpu().numpy())), memory)

    def shift(self, comm: Communicator, distance: int) -> _Copy:
        """Send to the rank `distance` to the right, and return what the one to the left has sent. Collective."""
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
    """State of all parts at one moment.

    Attributes:
        rank, size: Of this rank at that time.
        rest: State of each part but for its shards.
        copies: Shards of this rank, and of its neighbours, by rank.
    """

    rank: int
    size: int
    rest: dict[str, Any]
    copies: dict[int, _Copy]


class Snapshots:
    """The last two snapshots, so that the last one that any rank has counted is complete on all ranks.

    Args:
        sharded: Parts whose state is spread over ranks.
        whole: Further parts, whose state is rolled back with that of the others.
        redundancy: Number of neighbours that have a copy of each rank's shards.

    Attributes:
        serial: Number of the last snapshot that this rank knows to be complete on all ranks; -1 if there is none.
    """

    def __init__(self, sharded: Mapping[str, Sharded], whole: Mapping[str, Any], redundancy: int) -> None:
        self._sharded, self._whole, self._redundancy = sharded, whole, redundancy
        self.forget()

    def forget(self) -> None:
        """Drop all snapshots: this rank is to receive the state of others."""
        self.serial = -1
        self._taken: dict[int, _Snapshot] = {}

    def take(self, comm: Communicator) -> None:
        """Take a snapshot, and give the neighbours a copy of it; returns when all ranks have. Collective."""
        self._taken = {serial: taken for serial, taken in self._taken.items() if serial == self.serial}
        shards: dict[_Key, TensorShard] = {}
        rest = {name: _without_shards(part.snapshot(), (name,), shards) for name, part in self._sharded.items()}
        rest |= {name: deepcopy(part.state_dict()) for name, part in self._whole.items()}
        own = _Copy.of(shards, comm.device)
        taken = _Snapshot(comm.rank, comm.size, rest, {comm.rank: own})
        for distance in range(1, min(self._redundancy, comm.size - 1) + 1):
            taken.copies[(comm.rank - distance) % comm.size] = own.shift(comm, distance)
        self._taken[self.serial + 1] = taken
        # A rank that passes knows that every rank has the snapshot.
        comm.barrier()
        self.serial += 1

    def has(self, serial: int) -> bool:
        """Return whether this rank has the snapshot of this number."""
        return serial in self._taken

    def restore(self, comm: Communicator, serial: int, leader: int) -> None:
        """Return all parts to a snapshot, divided among the ranks of a new communicator. Collective.

        Args:
            comm: The communicator, to which the parts have moved.
            serial: The highest number of a snapshot that any rank has counted.
            leader: A rank with this snapshot, whose state newcomers get.

        Raises:
            RuntimeError: No rank has some shards; on every rank.
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
        """Send copies that only leaving ranks have to ranks that stay. Collective.

        Args:
            comm: All ranks.
            leaving: The ranks that leave.
        """
        known = comm.all_gather_object({s: (sorted(taken.copies), taken.size) for s, taken in self._taken.items()})
        for serial in sorted({serial for each in known for serial in each}):
            have = {rank: each[serial] for rank, each in enumerate(known) if serial in each}
            staying = [rank for rank in have if rank not in leaving]
            for shard in range(next(iter(have.values()))[1]):
                holders = [rank for rank, (copies, _) in have.items() if shard in copies]
                if not staying or not holders or set(holders) & set(staying):
                    continue
                src, dst = holders[0], staying[shard % len(staying)]
                if comm.rank == src:
                    self._taken[serial].copies[shard].send(comm, dst)
                elif comm.rank == dst:
                    self._taken[serial].copies[shard] = _Copy.recv(comm, src)
        comm.barrier()


def _without_shards(state: Any, path: _Key, shards: dict[_Key, TensorShard]) -> Any:
    """Return a copy of nested dicts without their shards, which are put into `shards` by their path."""
    if not isinstance(state, dict):
        return state.detach().clone() if isinstance(state, torch.Tensor) else deepcopy(state)
    kept = {}
    for key, value in state.items():
        if isinstance(value, TensorShard):
            shards[*path, key] = value
        else:
            kept[key] = _without_shards(value, (*path, key), shards)
    return kept
