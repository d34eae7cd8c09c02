"""Sharded optimizers and models end with the numbers of one process, for random trainings.

A failure names its seed, and the command that runs it again. `make soak` runs 6,720 programs, and 200 compiled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sharded_fuzzing import failures

from unisono.sharding import model, optimizer, shard_optimizer
from unisono.sharding.flat_parameters import FlatGradient
from unisono.sharding.optimizer import GradientSharder, ShardedOptimizer
from unisono.sharding.shard_optimizer import ShardOptimizer
from unisono.utils import backward_pass

pytestmark = pytest.mark.filterwarnings("ignore:backward.. has raised inside no_sync:UserWarning")

# Sixteen programs meet most mutants, and few more of them another backend or number of ranks.
SHORT = [("shm", 2, 16), ("shm", 3, 3), ("thread", 3, 3), ("thread", 4, 2), ("gloo", 2, 2)]
LONG = [("thread", 250), ("shm", 210), ("gloo", 100)]
MOST = 2


def check(found: Iterator[str]) -> None:
    texts = list(islice(found, MOST))
    assert not texts, "\n\n".join(texts)


@pytest.mark.parametrize(("backend", "size", "count"), SHORT)
def test_random_programs(backend: str, size: int, count: int) -> None:
    check(failures(range(count), backend, size))


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize(("backend", "count"), LONG)
def test_many_random_programs(backend: str, count: int, block: int, size: int) -> None:
    first = 1000 * block
    check(failures(range(first, first + count), backend, size))


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("block", range(5))
def test_many_random_programs_with_compiled_steps(block: int, size: int) -> None:
    first = 1000 * block
    check(failures(range(first, first + 20), "shm", size, compiled=True))


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _local_norm(parameters: Any, max_norm: float, comm: Any, norm_type: float = 2.0, **_: Any) -> torch.Tensor:
    """Return the norm of this rank's parts alone."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _zeros(self: Any, pieces: Any) -> None:
    """Give zeros to what no rank has used."""
    _COMMIT(self, pieces)
    for piece in pieces:
        if piece.tensor.grad is None:
            piece.tensor.grad = torch.zeros_like(piece.tensor)


def _last_only(self: Any, index: int, grad: torch.Tensor) -> None:
    """Forget what was accumulated before."""
    self.taken.discard(index)
    _TAKE(self, index, grad)


def _first_state(self: Any, state_dict: Any) -> None:
    """Load no state."""
    _LOAD(self, {**state_dict, "state": {}})


def _old_options(self: Any) -> Any:
    """Return a state whose groups are those of the start."""
    found = _STATE(self)
    groups = [{k: self.defaults.get(k, v) for k, v in group.items()} for group in found["param_groups"]]
    return {**found, "param_groups": groups}


def _first_bucket(self: Any, buckets: Any) -> None:
    """Exchange one bucket only."""
    _GATHER(self, buckets[:1])


_COMMIT: Any = FlatGradient.commit
_TAKE: Any = FlatGradient.take
_LOAD: Any = ShardOptimizer.load_state_dict
_STATE: Any = ShardOptimizer.state_dict
_GATHER: Any = ShardedOptimizer._gather

MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "norms of parts, ZeRO-2": (optimizer, "clip_grad_norm_", _local_norm),
    "norms of parts, ZeRO-3": (model, "clip_grad_norm_", _local_norm),
    "no trial": (shard_optimizer, "check_elementwise", lambda *_: shard_optimizer.SHARED_STATE),
    "no options shown": (optimizer.ShardedOptimizer, "_show_options", _nothing),
    "no options shared": (optimizer.ShardedOptimizer, "_share_options", _nothing),
    "zeros for none": (FlatGradient, "commit", _zeros),
    "last pass only": (FlatGradient, "take", _last_only),
    "no state loaded": (ShardOptimizer, "load_state_dict", _first_state),
    "old options saved": (ShardOptimizer, "state_dict", _old_options),
    "zero_grad of the model ignored": (GradientSharder, "follow_zero_grad", _nothing),
    "gradients of failed passes kept": (GradientSharder, "drop", _nothing),
    "one bucket exchanged": (ShardedOptimizer, "_gather", _first_bucket),
    "passes end in the order of the graph": (backward_pass, "_in_order", lambda _: 0),
    "buckets leave in the order of the graph": (GradientSharder, "_is_alone", True),
    "border of pieces moved": (shard_optimizer, "unwrap", lambda key, value, piece: value),
}


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant: str) -> None:
    with patch.object(*MUTANTS[mutant]):
        assert next(failures(range(1000), "thread", 2), None) is not None
