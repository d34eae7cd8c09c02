"""Composed transports that are wrong in one place, each killed by a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.core.call import Call
from unisono.errors import CommError
from unisono.testing.conformance import CHECKS, World
from unisono.transports.hierarchical.collectives import HierarchicalCollectives
from unisono.transports.hierarchical.composed import Hierarchical
from unisono.transports.hierarchical.paired import Paired

BY_NAME = {check.__name__: check for check in CHECKS}
TWO = World("thread+thread", timeout=1.0, hosts=((0, 2), (1, 3)))
UNEVEN = World("thread+thread", timeout=1.0, hosts=((1, 2, 3), (0,)))


def only_this_host_is_summed(self: Any, call: Call, share: torch.Tensor, deadline: float) -> None:
    """Keeps the sum of this host as the share."""


def nothing_is_handed_on(self: Any, tile: torch.Tensor, share: torch.Tensor, deadline: float) -> None:
    """Leaves each rank with its own share of the result."""
    self._shares(tile)[self._local_rank].copy_(share)


def root_last_of_its_host(self: Any, call: Call, deadline: float) -> None:
    """Reduces on the first rank of each host, and forgets the way from there to the root."""
    BULK_REDUCE(self, call._replace(root=self._hosts[0][0]), deadline)


def all_by_one_way(self: Any, batch: Any) -> Any:
    """Sends what is for this host by the numbers of the whole."""
    near = [m for m in batch if m.peer in self._local_ranks]
    return self.inner.post(near) if self.inner is not None and near else self.outer.post(batch)


def even_if_not(self: Any, *given: Any, **options: Any) -> None:
    """Says that it gathers also where hosts have different numbers of ranks."""
    INIT(self, *given, **options)
    self.native |= {"all_gather", "reduce_scatter"}


INIT, BULK_REDUCE = Hierarchical.__init__, HierarchicalCollectives.reduce
MUTANTS: list[tuple[type, str, Callable[..., Any], str, World]] = [
    (HierarchicalCollectives, "_exchange", only_this_host_is_summed, "all_reduce_equals_reference", TWO),
    (HierarchicalCollectives, "_gathered", nothing_is_handed_on, "all_reduce_equals_reference", TWO),
    (HierarchicalCollectives, "reduce", root_last_of_its_host, "reduce_equals_reference", TWO),
    (Paired, "post", all_by_one_way, "peers_are_separate", TWO),
    (Hierarchical, "__init__", even_if_not, "all_gather_equals_reference", UNEVEN),
]


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "check", "world"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_conformance_kills_mutant(
    owner: type, name: str, mutant: Callable[..., Any], check: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, CommError, IndexError, RuntimeError)):
        BY_NAME[check](world)
