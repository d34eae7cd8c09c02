"""Snapshots: a state taken apart, with the digests to compare, and the share that this rank writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.checkpoint.checksum import CHUNK, blocks, digest, hasher
from unisono.checkpoint.dtypes import as_bytes, memory_of, name_of
from unisono.checkpoint.manifest import TensorEntry
from unisono.checkpoint.sharding import Slice, shares
from unisono.checkpoint.state import Captured, capture
from unisono.checkpoint.tensor_shard import TensorShard
from unisono.checkpoint.tree import Node
from unisono.checkpoint.tree_utils import leaves
from unisono.checkpoint.writer import Shard

__all__ = ["Snapshot", "outline", "prepare"]


@dataclass
class Snapshot:
    """A state as this rank is going to write it.

    Attributes:
        tree, entries: The part common to all ranks: its structure, and dtype, shape and device of its tensors.
        digests: Digests of each tensor's blocks, slice by slice; empty for a single rank.
        own_trees, own_entries: The part that is this rank's.
        shards: Tensors that are `TensorShard`s.
        portions: The slices that this rank writes.
    """

    tree: Node
    entries: dict[str, TensorEntry]
    own_trees: list[Node]
    own_entries: dict[str, TensorEntry]
    shards: Mapping[str, TensorShard] = field(default_factory=dict)
    digests: dict[str, list[str]] = field(default_factory=dict)
    portions: list[Shard] = field(default_factory=list)

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The elements that this rank has of each sharded tensor, if any."""
        return {name: (s.start, s.stop) for name, s in self.shards.items() if s.start < s.stop}

    def fingerprint(self) -> bytes:
        """Fingerprint that is equal on two ranks if their states are."""
        return json.dumps([self._tensors(), self.tree], sort_keys=True).encode()

    def describe(self) -> dict[str, str]:
        """Text for every tensor and value, by name; values that share a path are listed together under it."""
        described = self._tensors()
        for name, value in leaves(self.tree).items():
            described[name] = f"{described[name]}, {value}" if name in described else value
        return described

    def _tensors(self) -> dict[str, str]:
        return {
            name: f"{name_of(e.dtype)} {list(e.shape)} "
            + ("in shards" if name in self.shards else digest(".".join(self.digests.get(name, ())).encode()))
            for name, e in self.entries.items()
        }


def outline(captured: Captured) -> Snapshot:
    """Return a snapshot with the structure of a state, without digests of its tensors."""
    return Snapshot(
        captured.tree,
        {name: _entry(tensor, captured.shards.get(name)) for name, tensor in captured.tensors.items()},
        list(captured.own_trees),
        {name: _entry(tensor) for name, tensor in captured.own_tensors.items()},
        captured.shards,
    )


def prepare(state: Any, rank: int, size: int, *, copy: bool) -> Snapshot:
    """Take a state apart, compute the digests to compare, and select this rank's share.

    Args:
        state: As passed to `save`.
        rank, size: This rank, and the number of ranks that save.
        copy: Copy the share, so that the state may change before it is written.

    Cost: reads all of the state if there are several ranks; with `copy`, copies 1/size of it.
    """
    captured = capture(state, rank)
    snapshot = outline(captured)
    slices: dict[str, list[tuple[int, Slice]]] = {name: [] for name in captured.tensors if name not in captured.shards}
    # By name: a dict may have been filled in another order on another rank.
    whole = {name: snapshot.entries[name] for name in slices}
    plan = shares(sorted((name, e.nbytes, e.dtype.itemsize) for name, e in whole.items()), size)
    for owner, given in enumerate(plan):
        for part in given:
            slices[part.name].append((owner, part))
    for name, parts in slices.items():
        flat, mine = _flat(captured.tensors[name])
        for owner, part in parts:
            keep = owner == rank
            data, found = _take(flat[part.start : part.stop], keep and copy and not mine, size > 1)
            snapshot.digests.setdefault(name, []).extend(found)
            if keep:
                snapshot.portions.append(_portion(snapshot.entries, part, data, found if size > 1 else None))
    for name, tensor in captured.own_tensors.items():
        snapshot.portions.append(_unshared(snapshot.own_entries, name, tensor, 0, copy))
    for name, shard in captured.shards.items():
        # A tensor without elements is written by the first rank, like one that is not sharded.
        if shard.start < shard.stop or (rank == 0 and not shard.shape.numel()):
            snapshot.portions.append(_unshared(snapshot.entries, name, shard.local, shard.start, copy))
    snapshot.portions.sort(key=lambda portion: -portion.dtype.itemsize)
    return snapshot


def _entry(tensor: torch.Tensor, shard: TensorShard | None = None) -> TensorEntry:
    return TensorEntry(tensor.dtype, tuple((shard or tensor).shape), str(tensor.device))


def _unshared(entries: Mapping[str, TensorEntry], name: str, tensor: torch.Tensor, start: int, copy: bool) -> Shard:
    """A portion with elements that only this rank has, from element `start` of the tensor on."""
    flat, mine = _flat(tensor)
    data, _ = _take(flat, copy and not mine, False)
    first = start * tensor.itemsize
    return _portion(entries, Slice(name, first, first + len(flat)), data, None)


def _portion(entries: Mapping[str, TensorEntry], part: Slice, data: torch.Tensor, found: list[str] | None) -> Shard:
    entry = entries[part.name]
    known = None if found is None else tuple(found)
    return Shard(part.name, entry.dtype, entry.shape, part.start, part.stop, data, known)


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor's bytes on the CPU, and whether they are a copy already."""
    flat = as_bytes(tensor.cpu())
    return flat, flat.data_ptr() != tensor.data_ptr()


def _take(flat: torch.Tensor, copy: bool, hashed: bool) -> tuple[torch.Tensor, list[str]]:
    """Return the bytes or a copy of them, and the digests of their blocks if `hashed`."""
    data = torch.empty_like(flat) if copy else flat
    if not hashed:
        return (data.copy_(flat) if copy else data), []
    memory, digests = memory_of(data), []
    for low, high in blocks(0, len(flat)):
        state = hasher()
        for start in range(low, high, CHUNK):
            stop = min(start + CHUNK, high)
            if copy:
                data[start:stop].copy_(flat[start:stop])
            state.update(memory[start:stop])
        digests.append(str(state.hexdigest()))
    return data, digests
