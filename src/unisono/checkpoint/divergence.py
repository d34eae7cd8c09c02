"""Detects ranks whose states differ in any bit, and makes the states equal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.loader import Destination
from unisono.checkpoint.manifest import BLOCK, TensorEntry, digest
from unisono.checkpoint.restore import Restorer, Wanted
from unisono.checkpoint.saver import PreparedState
from unisono.checkpoint.tree import DTYPE_NAMES, Captured, as_bytes, capture, dtype_of, names_in, tagged
from unisono.comm.equal_tensors import assert_equal_tensors

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["assert_in_sync", "sync"]


def assert_in_sync(state: Any, comm: Communicator) -> None:
    """Raise an error on every rank unless all ranks have the same state, bit for bit. Collective.

    NaNs with the same bits are equal; 0.0 and -0.0 are not.

    Args:
        state: Any state that `save` accepts, for example a module (with its buffers), a list of tensors, or a dict of
            modules and optimizers. Per-rank values (see `PerRank`) and the elements of `TensorShard`s may differ.
        comm: The ranks to compare.

    Raises:
        MismatchError: A tensor, number or string differs; the error names it and the ranks.
        TypeError: A value in some rank's state cannot be compared.

    Cost: reads the state once, on its device (about 1 ns per 4 bytes on one core), and gathers 72 bytes per rank. A
    single changed element is always detected; changes to several elements cancel out with probability 2**-32.

    Example:
        >>> def program(comm):
        ...     un.checkpoint.assert_in_sync({"w": torch.ones(2), "lr": 0.1 * comm.rank}, comm)
        >>> un.launch(program, 2, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.MismatchError: ...'lr': rank 1 differs from rank 0 (0.0 on rank 0; 0.1 on rank 1)...
    """
    scope = CollectiveScope(comm, "assert_in_sync")
    advice = "un.checkpoint.sync(state, comm) makes them equal"
    made: list[tuple[Captured, PreparedState]] = []

    def take_apart() -> str:
        captured = capture(state, comm.rank)
        snapshot = PreparedState(captured)
        made.append((captured, snapshot))
        return digest(snapshot.fingerprint())

    digests = scope.all_or_none(take_apart)
    captured, snapshot = made[0]
    scope.compare(digests, snapshot.describe, advice)
    # Sort by name: ranks may have filled their dicts in different orders.
    assert_equal_tensors(sorted(captured.whole.items()), comm, "the state differs between ranks", advice)


def sync(state: Any, comm: Communicator, src: int = 0) -> Any:
    """Overwrite every rank's state with the state of rank `src`, in place, and return it. Collective.

    Use `sync` if ranks have joined late or diverged. Samplers receive `src`'s state; random generators and `PerRank`
    values remain unchanged on each rank.

    Args:
        state: Any state that `save` accepts, without `TensorShard`s and with the same structure on every rank, except
            that on some ranks, optimizers may not have taken a step yet.
        comm: Communicator of the ranks whose states become equal.
        src: The rank to copy from.

    Returns:
        `state` itself if it is a dict, list, tensor or object; otherwise, ranks other than `src` get a new value.

    Raises:
        StateError: Some rank's state belongs to a different model, or an object rejects its new state; raised on every
            rank.
        TypeError: A value cannot be saved, or the state contains a `TensorShard`.
        ValueError: `src` is not a rank of `comm`.

    Cost: one broadcast of the state's bytes in messages of up to 4 MiB.

    Example:
        >>> def program(comm):
        ...     state = {"w": torch.full((2,), float(comm.rank)), "step": comm.rank}
        ...     return un.checkpoint.sync(state, comm, src=1)
        >>> un.launch(program, 2, "thread")[0]
        {'w': tensor([1., 1.]), 'step': 1}
    """
    scope = CollectiveScope(comm, "sync")
    source = comm.rank == src
    made: list[tuple[dict[str, torch.Tensor], str]] = []
    scope.all_or_none(lambda: made.append(_described(state, src) if source else ({}, "")))
    tensors, text = made[0]
    tree, trees, listed = json.loads(comm.broadcast_object(text if source else None, src))
    entries = {name: TensorEntry(dtype_of(dtype), tuple(shape)) for name, dtype, shape in listed}
    restoration = Restorer(entries, lambda index, policy: trees[index])
    builds: list[Any] = []

    def match() -> list[list[str]]:
        builds.append(restoration.match(state, tree))
        _refuse_shards(name for name, _ in restoration.late.shards)
        return [list(restoration.early.needed), list(restoration.late.needed)]

    found = scope.all_or_none(lambda: match() if not source else [[], []])

    def receive(wanted: Wanted, number: int) -> None:
        names = {name for needed in found for name in needed[number]}
        destinations = {name: Destination(entries[name], wanted.targets.get(name), None) for name in wanted.needed}
        for run in _runs({name: entry for name, entry in entries.items() if name in names}):
            _send(comm, src, run, tensors, destinations)
        restoration.values.update({name: destination.tensor() for name, destination in destinations.items()})

    with torch.no_grad():
        receive(restoration.early, 0)
        restoration.load_early(scope)
        receive(restoration.late, 1)
        scope.all_or_none(lambda: builds.append(builds[0]()) if not source else None)
    return state if source else builds[1]


def _described(state: Any, rank: int) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors to send, and the rest of the state as text."""
    captured = capture(state, rank)
    _refuse_shards(captured.shards)
    policies = dict(body for tag, body in tagged(captured.tree) if tag == "$rank")
    trees = [
        tree if policies.get(index) in ("shared", "all") else None for index, tree in enumerate(captured.own_trees)
    ]
    tensors = dict(captured.tensors)
    tensors.update({name: captured.own_tensors[name] for tree in trees for name in names_in(tree)})
    listed = [(name, DTYPE_NAMES[t.dtype], list(t.shape)) for name, t in tensors.items()]
    return tensors, json.dumps([captured.tree, trees, listed])


def _refuse_shards(names: Iterable[str]) -> None:
    for name in names:
        raise TypeError(f"{name!r} is a TensorShard, of which no rank has all elements; save the state and load it")


_Run = list[tuple[str, int, int]]


def _runs(entries: dict[str, TensorEntry]) -> Iterator[_Run]:
    """Yield the byte ranges to send in each message: small tensors are combined, and large tensors are split."""
    run: _Run = []
    filled = 0
    for name, entry in entries.items():
        start = 0
        while start < entry.nbytes:
            stop = min(entry.nbytes, start + BLOCK - filled)
            run.append((name, start, stop))
            filled += stop - start
            start = stop
            if filled == BLOCK:
                yield run
                run = []
                filled = 0
    if run:
        yield run


def _send(
    comm: Communicator,
    src: int,
    run: _Run,
    tensors: dict[str, torch.Tensor],
    destinations: dict[str, Destination],
) -> None:
    if comm.rank == src:
        parts = [as_bytes(tensors[name])[start:stop].to(comm.device) for name, start, stop in run]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        length = sum(stop - start for _, start, stop in run)
        data = torch.empty(length, dtype=torch.uint8, device=comm.device)
    comm.broadcast(data, src)
    position = 0
    for name, start, stop in run:
        if name in destinations:
            destinations[name].put(start, data[position : position + stop - start])
        position += stop - start
