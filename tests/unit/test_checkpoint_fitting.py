"""What can be saved and filled: tensors without memory of their own, dicts and tuples of other types, lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import unisono as un
from unisono.checkpoint import StateError


def hollow() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (hollow, "'w' is a FakeTensor, which has no memory of its own"),
        (lambda: nn.LazyLinear(3), "'w.weight' has no shape yet"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "'w' is a tensor of torch.jagged"),
    ],
)
def test_what_has_no_plain_memory_is_not_saved(tmp_path: Path, make: Callable[[], object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        un.checkpoint.save(tmp_path, {"w": make()})


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (hollow(), "'w' is a FakeTensor here, without memory of its own"),
        (torch.zeros(1).expand(3), "'w' has elements here that share memory"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_changes(
    tmp_path: Path, target: torch.Tensor, said: str
) -> None:
    un.checkpoint.save(tmp_path, {"v": torch.ones(2), "w": torch.arange(3.0)})
    other = torch.zeros(2)
    with pytest.raises(StateError, match=said):
        un.checkpoint.load(tmp_path, {"v": other, "w": target})
    assert not other.any()


def test_windows_that_overlap_are_refused(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.arange(12.0).view(4, 3)})
    with pytest.raises(StateError, match="share memory"):
        un.checkpoint.load(tmp_path, {"w": torch.zeros(6).unfold(0, 3, 1)})


def test_lazy_modules_take_the_shape_of_what_is_loaded(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    un.checkpoint.save(tmp_path, net)
    assert torch.equal(un.checkpoint.load(tmp_path, nn.LazyLinear(3)).weight, net.weight)
