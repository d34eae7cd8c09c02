"""Seeds random generators: independent generators for each rank, and one that is equal on all ranks."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from unisono.communicator import Communicator

__all__ = ["Generators", "seed", "stream_seed"]

_LIMIT = 1 << 32
_PER_RANK = 4


@dataclass(frozen=True)
class Generators:
    """Two CPU random generators, which a checkpoint's state can contain in addition to `un.checkpoint.RNG()`.

    If a checkpoint is loaded by more ranks than saved it, the generator `rank` keeps its current state on the
    additional ranks. The generator `shared` remains equal on all ranks.

    Attributes:
        rank: Draws different numbers on each rank.
        shared: Draws the same numbers on every rank, as long as every rank makes the same draws.

    Example:
        >>> generators = un.utils.seed(7)
        >>> state = generators.state_dict()
        >>> first = torch.rand(1, generator=generators.shared)
        >>> generators.load_state_dict(state)
        >>> bool(torch.rand(1, generator=generators.shared) == first)
        True
    """

    rank: torch.Generator
    shared: torch.Generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `shared` as a tensor, equal on all ranks, and the state of `rank` as a generator."""
        return {"shared": self.shared.get_state(), "rank": self.rank.clone_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both generators.

        Args:
            state: Result of `state_dict`. In a loaded checkpoint, the state of `rank` is a tensor.
        """
        own = state["rank"]
        self.shared.set_state(state["shared"])
        self.rank.set_state(own.get_state() if isinstance(own, torch.Generator) else own)


def seed(seed: int, comm: Communicator | None = None) -> Generators:
    """Seed the global generators of Python, numpy (if imported) and torch (on all devices), differently on each rank.

    Collective. A rank's random numbers depend on the seed and the rank, not on the number of ranks. To save all
    generators in a checkpoint, add `un.checkpoint.RNG()` and the returned generators to its state. Ranks that are
    threads have separate generators, except on a GPU, which has a single generator.

    Args:
        seed: An integer, equal on all ranks.
        comm: Communicator of the ranks; None for a single process.

    Returns:
        Two additional generators: one that differs between ranks, and one that is equal on all ranks.

    Raises:
        MismatchError: Ranks passed different seeds. Raised on every rank.
        TypeError: The seed is not an integer.

    Method: the seed is hashed with BLAKE2, and each generator's number is added to the lower 32 bits of the hash, the
    only bits that torch's Mersenne Twister uses. The sum is permuted with MurmurHash3's finalizer, so no two generators
    have the same lower bits.

    Example:
        >>> def program(comm):
        ...     generators = un.utils.seed(7, comm)
        ...     return torch.rand(1, generator=generators.rank), torch.rand(1, generator=generators.shared)
        >>> (own, shared), (other, same) = un.launch(program, 2, "thread")
        >>> bool(own == other), bool(shared == same)
        (False, True)
    """
    whole = isinstance(seed, Integral)
    if comm is not None:
        # An invalid seed on one rank must raise an error on all ranks.
        comm.agree(int(seed) if whole else f"a {type(seed).__name__}", "seed")
        comm.flush_agreements()
    if not whole:
        raise TypeError(f"seed must be a whole number, not a {type(seed).__name__}")
    rank = 0 if comm is None else comm.rank
    first = 1 + _PER_RANK * rank
    random.seed(stream_seed(seed, first))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(stream_seed(seed, first + 1) % _LIMIT)
    torch.manual_seed(stream_seed(seed, first + 2))
    return Generators(_generator(stream_seed(seed, first + 3)), _generator(stream_seed(seed, 0)))


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def stream_seed(seed: int, number: int) -> int:
    """Return the 64-bit seed of a generator; the lower half of the seed is different for each number."""
    upper, lower = divmod(int.from_bytes(hashlib.blake2b(str(int(seed)).encode(), digest_size=8).digest()), _LIMIT)
    mixed = (lower + number) % _LIMIT
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ mixed >> shift) * factor % _LIMIT
    return upper * _LIMIT + mixed
