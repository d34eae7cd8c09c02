"""Ranks that should hold the same parameters, and do they: bit for bit, for the price of reading them once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch

from unisono.communicator import Communicator
from unisono.errors import MismatchError
from unisono.gradients.periodic import Model, PeriodicAction, Schedule, agree, described, named_tensors

__all__ = ["DivergenceGuard", "assert_in_sync", "hash_of"]

_CHUNK = 1 << 16
_NAMED = 4
# Words of 32 bits at most: products with odd keys of 64 bits then keep a trace of every bit.
_WORD = {1: torch.uint8, 2: torch.int16}


class DivergenceGuard(PeriodicAction):
    """Check, every n-th step, that all ranks hold the same parameters, bit for bit.

    Averaged gradients and equal optimizers keep ranks equal; a forgotten broadcast, a seed, a parameter
    that is not averaged or a faulty memory does not. NaNs of the same bits are equal; 0.0 and -0.0 are
    not. Construction is collective, and so is each check.

    Args:
        model: A module, or its parameters.
        comm: The ranks that should be equal.
        every: 100, or an `every(...)`, or a function of the step's number (from 1).
        buffers: Also check a module's buffers. BatchNorm's differ, unless it is a `SyncBatchNorm`.

    Raises:
        MismatchError: From `step` and `check`, on every rank: which parameters differ, and on which ranks.
            Training may continue, for instance after `un.broadcast_parameters`.

    Cost: reads the parameters once (about 1 ns for 4 bytes on one core), and gathers 8 bytes a rank. A single
    changed parameter element is always detected; changes of several cancel out with probability 2**-32.

    Example:
        >>> from unisono.gradients.divergence_guard import DivergenceGuard
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1)
        ...     un.broadcast_parameters(model, comm)
        ...     guard = DivergenceGuard(model, comm, every=1)
        ...     guard.step()
        ...     with torch.no_grad():
        ...         model.bias += 0.5 * (comm.rank == 2)
        ...     guard.step()
        >>> un.launch(program, 3, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.MismatchError: ...'bias': rank 2 differs from ranks 0, 1 (by up to 0.5)...
    """

    def __init__(self, model: Model, comm: Communicator, every: int | Schedule = 100, *, buffers: bool = False) -> None:
        super().__init__(model, comm, every, buffers=buffers)

    def check(self) -> None:
        """Check now, regardless of the schedule. Collective."""
        self._now()

    def _act(self) -> None:
        _compare(self._comm, self.named, f" after step {self.steps}")


def assert_in_sync(model: Model, comm: Communicator, *, buffers: bool = False) -> None:
    """Raise `MismatchError` on every rank unless all hold the same parameters, bit for bit. Collective.

    Args:
        model, comm, buffers: As in `DivergenceGuard`.

    Raises:
        MismatchError: Names the parameters that differ, by how much, and on which ranks; or ranks have
            parameters of different names, shapes or dtypes.
        TypeError, ValueError: `model` contains something other than tensors, or nothing; `buffers` without a module.

    Cost: as of `DivergenceGuard`.

    Example:
        >>> from unisono.gradients.divergence_guard import assert_in_sync
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1)
        ...     un.broadcast_parameters(model, comm)
        ...     assert_in_sync(model, comm)
        >>> un.launch(program, 2, "thread")
        [None, None]
    """
    named = named_tensors(model, buffers=buffers)
    agree(comm, "assert_in_sync", described(named))
    with torch.no_grad():
        _compare(comm, named, "")


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that depend on every bit of a tensor and on its place: a 0-d int64 tensor on the same device.

    It is multilinear (Lemire and Kaser: Strongly universal string hashing is fast, 2014): the sum of words
    times odd keys, modulo 2**64. Strides do not matter, the order of elements does.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> hash_of(one) == hash_of(one.clone()), hash_of(one) == hash_of(other)
        (tensor(True), tensor(False))
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Unlike view(-1), this has stride 1 also where there is only one element: else it cannot be viewed as words.
    flat = whole.as_strided((whole.numel(),), (1,))
    words = flat.view(_WORD.get(flat.itemsize, torch.int32))
    keys = _keys().to(tensor.device)
    turns = random.Random(_CHUNK)
    for chunk in words.split(_CHUNK):
        # Integers wrap around, which is the modulus.
        total += (chunk * keys[: chunk.numel()]).sum() * _odd(turns)
    return total


def _compare(comm: Communicator, named: Sequence[tuple[str, torch.Tensor]], when: str) -> None:
    """Ranks agree on names and shapes already."""
    if not named:
        return
    own = torch.stack([hash_of(tensor).to(comm.device) for _, tensor in named])
    digest = hash_of(own).view(1)
    digests = digest.new_empty(comm.size)
    comm.all_gather_single(digests, digest)
    if bool((digests == digests[0]).all()):
        return
    table = own.new_empty((comm.size, len(named)))
    comm.all_gather_single(table, own)
    columns = [column.tolist() for column in table.t()]
    wrong = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    told = [f"{named[i][0]!r}: {_sides(columns[i])} ({_distance(comm, named[i][1])})" for i in wrong[:_NAMED]]
    more = f"; and {len(wrong) - _NAMED} more, the last of them {named[wrong[-1]][0]!r}" if len(wrong) > _NAMED else ""
    raise MismatchError(
        f"parameters differ between ranks{when}: {'; '.join(told)}{more}. "
        "un.broadcast_parameters(model, comm) makes them equal",
        rank=comm.rank,
        size=comm.size,
    )


def _sides(hashes: Sequence[int]) -> str:
    """Return text that names the ranks that differ from the majority."""
    sides: dict[int, list[int]] = {}
    for rank, value in enumerate(hashes):
        sides.setdefault(value, []).append(rank)
    groups = sorted(sides.values(), key=len, reverse=True)
    if len(groups[0]) == len(groups[1]):
        return f"no two of these are equal: {'; '.join(map(_ranks, groups))}"
    odd = sorted(rank for group in groups[1:] for rank in group)
    return f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from {_ranks(groups[0])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
