"""Ranks whose state differs, bit for bit: detected for the price of reading it once, and made equal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from unisono.checkpoint.collective import CollectiveScope, odd_ranks
from unisono.checkpoint.loader import Destination
from unisono.checkpoint.manifest import BLOCK, TensorEntry, digest
from unisono.checkpoint.restore import Restorer, Wanted
from unisono.checkpoint.saver import PreparedState
from unisono.checkpoint.tree import DTYPE_NAMES, Captured, as_bytes, capture, dtype_of, names_in, tagged
from unisono.errors import MismatchError

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["assert_equal_tensors", "assert_in_sync", "sync", "tensor_hash"]

_CHUNK = 1 << 16
_NAMED = 4
# Words of 32 bits at most: products with odd keys of 64 bits then keep a trace of every bit.
_WORD = {1: torch.uint8, 2: torch.int16}


def assert_in_sync(state: Any, comm: Communicator) -> None:
    """Raise on every rank unless all hold the same state, bit for bit. Collective.

    NaNs of the same bits are equal; 0.0 and -0.0 are not.

    Args:
        state: As for `save`: a module with its buffers, a list of tensors, a dict of these and of optimizers.
            Values that are `PerRank`, or always per rank, may differ, and the elements of `TensorShard`s do.
        comm: The ranks to compare.

    Raises:
        MismatchError: A tensor, number or string differs; names it and the ranks.
        TypeError: A value in the state cannot be compared, on any rank.

    Cost: reads the state once, where it is (about 1 ns for 4 bytes on one core), and gathers 72 bytes a rank. A
    single changed element is always detected; changes of several cancel out with probability 2**-32.

    Example:
        >>> def program(comm):
        ...     un.checkpoint.assert_in_sync({"w": torch.ones(2), "lr": 0.1 * comm.rank}, comm)
        >>> un.launch(program, 2, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.MismatchError: ...'lr': rank 1 differs from rank 0 (0.0 on rank 0; 0.1 on rank 1)...
    """
    team = CollectiveScope(comm, "assert_in_sync")
    advice = "un.checkpoint.sync(state, comm) makes them equal"
    made: list[tuple[Captured, PreparedState]] = []

    def take_apart() -> str:
        captured = capture(state, comm.rank)
        snapshot = PreparedState(captured)
        made.append((captured, snapshot))
        return digest(snapshot.fingerprint())

    digests = team.all_or_none(take_apart)
    captured, snapshot = made[0]
    team.compare(digests, snapshot.describe, advice)
    whole = {name: tensor for name, tensor in captured.tensors.items() if name not in captured.shards}
    # By name: a dict may have been filled in another order on another rank.
    assert_equal_tensors(sorted(whole.items()), comm, "the state differs between ranks", advice)


def assert_equal_tensors(
    named: Sequence[tuple[str, torch.Tensor]], comm: Communicator, complaint: str, advice: str
) -> None:
    """Raise `MismatchError` on every rank unless all hold the same elements, bit for bit. Collective.

    Args:
        named: Tensors with their names: the same names, shapes and dtypes on all ranks.
        comm: The ranks to compare.
        complaint, advice: First and last words of the error.
    """
    if not named:
        return
    with torch.no_grad():
        own = torch.stack([tensor_hash(tensor).to(comm.device) for _, tensor in named])
        mine = tensor_hash(own).view(1)
        found = mine.new_empty(comm.size)
        comm.all_gather_single(found, mine)
        if bool((found == found[0]).all()):
            return
        table = own.new_empty((comm.size, len(named)))
        comm.all_gather_single(table, own)
        odd = [odd_ranks(column.tolist()) for column in table.t()]
        wrong = [(name, tensor, ranks) for (name, tensor), ranks in zip(named, odd, strict=True) if ranks]
        listed = [f"{name!r}: {ranks} ({_distance(comm, tensor)})" for name, tensor, ranks in wrong[:_NAMED]]
    more = f"; and {len(wrong) - _NAMED} more, the last of them {wrong[-1][0]!r}" if len(wrong) > _NAMED else ""
    raise MismatchError(f"{complaint}: {'; '.join(listed)}{more}. {advice}", rank=comm.rank, size=comm.size)


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that depend on every bit of a tensor and on its place: a 0-d int64 tensor on the same device.

    It is multilinear (Lemire and Kaser: Strongly universal string hashing is fast, 2014): the sum of words
    times odd keys, modulo 2**64. Strides do not matter, the order of elements does.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> tensor_hash(one) == tensor_hash(one.clone()), tensor_hash(one) == tensor_hash(other)
        (tensor(True), tensor(False))
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Unlike view(-1), this has stride 1 also where there is only one element: else it cannot be viewed as words.
    flat = dense.as_strided((dense.numel(),), (1,))
    words = flat.view(_WORD.get(flat.itemsize, torch.int32))
    keys = _keys().to(tensor.device)
    turns = random.Random(_CHUNK)
    for chunk in words.split(_CHUNK):
        # Integers wrap around, which is the modulus.
        total += (chunk * keys[: chunk.numel()]).sum() * _odd(turns)
    return total


def _distance(comm: Communicator, tensor: torch.Tensor) -> str:
    """Return text with the largest difference between ranks in one element."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    low, high = (values.detach().double().clone() for _ in range(2))
    comm.all_reduce(low, "min")
    comm.all_reduce(high, "max")
    distance = (high - low).abs().max().item()
    return f"by up to {distance:.3g}" if distance else "equal as numbers, in other bits"


@cache
def _keys() -> torch.Tensor:
    # Python's generator gives the same numbers in every version, and on every rank.
    source = random.Random(1)
    return torch.tensor([_odd(source) for _ in range(_CHUNK)])


def _odd(source: random.Random) -> int:
    return source.getrandbits(64) - (1 << 63) | 1


def sync(state: Any, comm: Communicator, src: int = 0) -> Any:
    """Make every rank's state that of rank `src`, in place, and return it. Collective.

    Intended for ranks that have joined later, or have diverged. Samplers take over `src`'s state; random
    generators and `PerRank` values stay unchanged on each rank.

    Args:
        state: As for `save`, of the same shape on every rank; an optimizer may not have stepped yet.
        comm: The ranks to make equal.
        src: The rank to copy from.

    Returns:
        `state` itself if it is a dict, list, tensor or object; else, on the other ranks, a new value.

    Raises:
        StateError: On every rank, if some rank's state is of another model, or an object refuses it; as `load`.
        TypeError: As `save`; or the state has a `TensorShard`.
        ValueError: `src` is no rank of `comm`.

    Cost: one broadcast of the state's bytes in messages of up to 4 MiB.

    Example:
        >>> def program(comm):
        ...     state = {"w": torch.full((2,), float(comm.rank)), "step": comm.rank}
        ...     return un.checkpoint.sync(state, comm, src=1)
        >>> un.launch(program, 2, "thread")[0]
        {'w': tensor([1., 1.]), 'step': 1}
    """
    team = CollectiveScope(comm, "sync")
    source = comm.rank == src
    made: list[Any] = []
    team.all_or_none(lambda: made.append(_described(state, src) if source else None))
    if not source:
        made[0] = None, ""
    tensors, text = made[0]
    tree, trees, listed = json.loads(comm.broadcast_object(text if source else None, src))
    entries = {name: TensorEntry(dtype_of(dtype), tuple(shape)) for name, dtype, shape in listed}
    restoration = Restorer(entries, lambda index, policy: trees[index])
    builds: list[Any] = []

    def match() -> list[list[str]]:
        builds.append(restoration.match(state, tree))
        _refuse_shards(name for name, _ in restoration.late.shards)
        return [list(restoration.early.needed), list(restoration.late.needed)]

    found = team.all_or_none(lambda: match() if not source else [[], []])

    def receive(wanted: Wanted, number: int) -> None:
        names = {name for needed in found for name in needed[number]}
        destinations = {name: Destination(entries[name], wanted.targets.get(name), None) for name in wanted.needed}
        for run in _runs({name: entry for name, entry in entries.items() if name in names}):
            _send(comm, src, run, tensors, destinations)
        restoration.values.update({name: destination.tensor() for name, destination in destinations.items()})

    with torch.no_grad():
        receive(restoration.early, 0)
        restoration.load_early(team)
        receive(restoration.late, 1)
        team.all_or_none(lambda: builds.append(builds[0]()) if not source else None)
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
    """Bytes of tensors that travel in one message: small ones together, large ones in parts."""
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
    tensors: dict[str, torch.Tensor] | None,
    destinations: dict[str, Destination],
) -> None:
    if tensors is not None:
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
