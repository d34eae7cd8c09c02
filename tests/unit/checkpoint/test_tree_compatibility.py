"""States that can be saved and loaded: tensors without storage, dicts and tuples of other types, lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import ConstantLR, MultiStepLR, SequentialLR

import unisono as un
from unisono.checkpoint import StateError
from unisono.testing import run_ranks


class Size(NamedTuple):
    width: int
    height: Any


class Moved(nn.Module):
    """A module of version 2: an older or unversioned state is twice as large."""

    _version = 2

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), value))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[prefix + "w"] = state[prefix + "w"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def hollow() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (hollow, "'w' is a FakeTensor, whose elements are not in its own memory"),
        (lambda: nn.LazyLinear(3), "'w.weight' has no shape yet"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "'w' is a NestedTensor"),
    ],
)
def test_opaque_tensors_are_not_saved(tmp_path: Path, make: Callable[[], object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        un.checkpoint.save(tmp_path, {"w": make()})


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (hollow(), "'w' is a FakeTensor here, without memory of its own"),
        (torch.zeros(1).expand(3), "'w' has elements here that share memory"),
    ],
)
def test_unfillable_state_is_rejected_before_any_change(tmp_path: Path, target: torch.Tensor, said: str) -> None:
    un.checkpoint.save(tmp_path, {"v": torch.ones(2), "w": torch.arange(3.0)})
    other = torch.zeros(2)
    with pytest.raises(StateError, match=said):
        un.checkpoint.load(tmp_path, {"v": other, "w": target})
    assert not other.any()


def test_overlapping_tensors_are_rejected(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.arange(12.0).view(4, 3)})
    with pytest.raises(StateError, match="share memory"):
        un.checkpoint.load(tmp_path, {"w": torch.zeros(6).unfold(0, 3, 1)})


def test_lazy_modules_take_the_loaded_shape(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    un.checkpoint.save(tmp_path, net)
    assert torch.equal(un.checkpoint.load(tmp_path, nn.LazyLinear(3)).weight, net.weight)


@pytest.mark.parametrize("saved", [[nn.Linear(1, 1), nn.Linear(1, 1)], {"a": nn.Linear(1, 1)}, 3])
def test_objects_in_a_list_are_never_skipped(tmp_path: Path, saved: object) -> None:
    un.checkpoint.save(tmp_path, {"models": saved})
    with pytest.raises(StateError, match=r"'models' (has 2 entries in it, 1 here|is a list here, but not in it)"):
        un.checkpoint.load(tmp_path, {"models": [nn.Linear(1, 1)]})


def test_dicts_and_tuples_keep_their_types(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"size": Size(2, torch.ones(1)), "seen": Counter(a=2), "by": {np.int64(3): 1}})
    target = {"size": Size(0, torch.zeros(1)), "seen": Counter(a=5, b=1), "by": {}}
    state = un.checkpoint.load(tmp_path, target)
    assert (state["size"].width, state["size"].height.item()) == (2, 1)
    assert state["seen"] == Counter(a=2)
    assert state["by"] == {3: 1}
    un.checkpoint.save(tmp_path, Counter(a=2))
    assert un.checkpoint.load(tmp_path, Counter(a=5)) == Counter(a=2)


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_scheduler_with_a_counter_resumes(tmp_path: Path) -> None:
    def made() -> tuple[torch.optim.Optimizer, SequentialLR]:
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        parts = [ConstantLR(optimizer), MultiStepLR(optimizer, [1, 2])]
        return optimizer, SequentialLR(optimizer, parts, [2])

    _, saved = made()
    un.checkpoint.save(tmp_path, {"scheduler": saved})
    optimizer, scheduler = made()
    un.checkpoint.load(tmp_path, {"scheduler": scheduler})
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("around", [lambda module: module, lambda module: nn.Sequential(nn.Linear(1, 1), module)])
def test_modules_receive_their_version(tmp_path: Path, around: Callable[[nn.Module], nn.Module]) -> None:
    def program(comm: un.Communicator) -> list[float]:
        saved, other = Moved(8.0 + comm.rank), Moved(0.0)
        model = around(saved)
        un.checkpoint.sync({"model": model}, comm)
        un.checkpoint.save(tmp_path, {"model": model}, comm)
        un.checkpoint.load(tmp_path, {"model": around(other)}, comm)
        return [saved.w[0].item(), other.w[0].item()]

    assert run_ranks(program, 2) == [[8, 8], [8, 8]]
    older = Moved(8.0)
    older._version = 1
    un.checkpoint.save(tmp_path, older)
    assert un.checkpoint.load(tmp_path, Moved(0.0)).w[0] == 4


@pytest.mark.parametrize(
    ("saved", "here", "fits"),
    [
        (torch.float64, torch.float16, True),
        (torch.int64, torch.float32, True),
        (torch.uint8, torch.int16, True),
        (torch.bool, torch.int8, True),
        (torch.float32, torch.complex64, True),
        (torch.float32, torch.int64, False),
        (torch.complex64, torch.float64, False),
        (torch.int64, torch.int32, False),
        (torch.int8, torch.uint8, False),
        (torch.int8, torch.bool, False),
    ],
)
def test_dtype_conversion_must_preserve_values(
    tmp_path: Path, saved: torch.dtype, here: torch.dtype, fits: bool
) -> None:
    un.checkpoint.save(tmp_path / "it", {"x": torch.ones(2, dtype=saved)})
    target = torch.zeros(2, dtype=here)
    if fits:
        un.checkpoint.load(tmp_path / "it", {"x": target})
        assert target.tolist() == [1, 1]
    else:
        with pytest.raises(StateError, match=r"'x' is torch.* here, which would change its values"):
            un.checkpoint.load(tmp_path / "it", {"x": target})
        assert target.tolist() == [0, 0]
