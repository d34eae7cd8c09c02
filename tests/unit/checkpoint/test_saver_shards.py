"""Tensors of which each rank has a part, and the file the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.checkpoint import Checkpointer, CorruptError, PerRank, StateError, TensorShard
from unisono.errors import MismatchError
from unisono.testing import run_ranks

Tensors = dict[str, torch.Tensor]


def tensors_of(seed: int) -> Tensors:
    source = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 5, generator=source),
        "double": torch.randn(7, dtype=torch.float64, generator=source),
        "scalar": torch.randn((), generator=source),
        "empty": torch.zeros(0, 3),
        "bits": torch.randn(9, generator=source) > 0,
        "half": torch.randn(2, 3, generator=source).bfloat16(),
    }


def shard_of(tensor: torch.Tensor, part: int, parts: int) -> TensorShard:
    """One of equal parts; the last ones may be empty."""
    length = -(-tensor.numel() // parts)
    low, high = (min(k * length, tensor.numel()) for k in (part, part + 1))
    return TensorShard(tensor.flatten()[low:high].clone(), low, tensor.shape)


def shards_of(tensors: Tensors, part: int, parts: int) -> dict[str, Any]:
    return {name: shard_of(tensor, part, parts) for name, tensor in tensors.items()}


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_any_number_of_ranks_saves_and_loads(tmp_path: Path, saved: int) -> None:
    whole = tensors_of(1)

    def save(comm: un.Communicator) -> None:
        # The last rank has the first elements.
        un.checkpoint.save(tmp_path / "shards", shards_of(whole, comm.size - 1 - comm.rank, comm.size), comm)
        un.checkpoint.save(tmp_path / "plain", whole, comm)

    def load(comm: un.Communicator) -> None:
        for path in ("shards", "plain"):
            state = shards_of(tensors_of(2), comm.rank, comm.size)
            locals_before = {name: shard.local for name, shard in state.items()}
            un.checkpoint.load(tmp_path / path, state, comm)
            for name, shard in state.items():
                assert shard.local is locals_before[name]
                assert torch.equal(shard.local, shard_of(whole[name], comm.rank, comm.size).local), name

    run_ranks(save, saved)
    for loaded in (1, 2, 3, 4):
        run_ranks(load, loaded)
    loaded_whole = un.checkpoint.load(tmp_path / "shards")
    assert all(torch.equal(loaded_whole[name], tensor) for name, tensor in whole.items())
    one, other = (un.checkpoint.verify(tmp_path / path) for path in ("shards", "plain"))
    assert one.state == other.state
    assert list(one.tensors) == list(other.tensors)
    for name, entry in one.tensors.items():
        there = other.tensors[name]
        assert (entry.dtype, entry.shape, entry.device) == (there.dtype, there.shape, there.device)


def test_plain_module_and_optimizer_load_shards(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()

    def save(comm: un.Communicator) -> None:
        moments = {
            number: {k: shard_of(v, comm.rank, comm.size) for k, v in state.items()}
            for number, state in states["state"].items()
        }
        parameters = {name: shard_of(p.detach(), comm.rank, comm.size) for name, p in model.named_parameters()}
        un.checkpoint.save(tmp_path, {"model": parameters, "optimizer": {**states, "state": moments}}, comm)

    run_ranks(save, 3)
    fresh = nn.Linear(5, 3)
    again = torch.optim.SGD(fresh.parameters(), 0.1, momentum=0.9)
    un.checkpoint.load(tmp_path, {"model": fresh, "optimizer": again})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert all(torch.equal(again.state_dict()["state"][1][k], v) for k, v in states["state"][1].items())
    un.checkpoint.convert(tmp_path, tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["model"]["weight"], model.weight)


@pytest.mark.parametrize(
    ("rank_1", "message"),
    [
        (lambda: TensorShard(torch.zeros(4), 2, (6,)), "'w', of shape [6], overlap: elements 2 to 3 are on ranks 0"),
        (lambda: TensorShard(torch.zeros(2), 4, (6,)), "lack elements from 3 on: rank 0 has 0 to 3, rank 1 has 4 to 6"),
        (lambda: TensorShard(torch.zeros(2), 3, (6,)), "lack elements from 5 on: rank 0 has 0 to 3, rank 1 has 3 to 5"),
        (lambda: TensorShard(torch.zeros(0), 0, (6,)), "lack elements from 3 on: rank 0 has 0 to 3"),
        (lambda: TensorShard(torch.zeros(3), 3, (2, 3)), "'w': rank 1 differs from rank 0 (float32 [6] in shards on"),
        (lambda: TensorShard(torch.zeros(3).double(), 3, (6,)), "(float32 [6] in shards on rank 0; float64"),
        (lambda: torch.zeros(6), "'w': rank 1 differs from rank 0 (float32 [6] in shards on rank 0; float32 [6] "),
    ],
)  # fmt: skip
def test_shards_that_do_not_fit_together(tmp_path: Path, rank_1: Any, message: str) -> None:
    def program(comm: un.Communicator) -> str:
        mine = TensorShard(torch.zeros(3), 0, torch.Size([6])) if comm.rank == 0 else rank_1()
        with pytest.raises(MismatchError) as caught:
            un.checkpoint.save(tmp_path, {"w": mine}, comm)
        return str(caught.value)

    for text in run_ranks(program, 2):
        assert message in text
        assert "Nothing was written" in text
    assert not list(tmp_path.iterdir())


def test_one_process_needs_the_whole_tensor(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="lack elements from 0 on: rank 0 has 1 to 6"):
        un.checkpoint.save(tmp_path, {"w": TensorShard(torch.zeros(5), 1, torch.Size([6]))})


def test_only_the_range_is_read_and_checked(tmp_path: Path) -> None:
    million = 1 << 20
    whole = torch.arange(12 * million, dtype=torch.int32)
    un.checkpoint.save(tmp_path, {"w": whole})
    file = next(tmp_path.glob("*.safetensors"))

    def program(comm: un.Communicator) -> list[int]:
        totals: list[int] = []
        shard = TensorShard(torch.zeros(3 * million, dtype=torch.int32), 3 * million * comm.rank, whole.shape)
        un.checkpoint.load(tmp_path, {"w": shard}, comm, progress=lambda done, total: totals.append(total))
        assert torch.equal(shard.local, whole[shard.start : shard.stop])
        return totals[-1:]

    un.checkpoint.load(
        tmp_path,
        {"w": TensorShard(torch.zeros(0, dtype=torch.int32), 5, whole.shape)},
        progress=lambda done, total: pytest.fail("something was read"),
    )
    # Blocks have 4 MiB.
    assert all(total <= (12 + 4 + 1) * million for (total,) in run_ranks(program, 4))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    part = TensorShard(torch.zeros(3, dtype=torch.int32), 0, whole.shape)
    un.checkpoint.load(tmp_path, {"w": part})
    last = TensorShard(torch.zeros(3, dtype=torch.int32), 12 * million - 7, whole.shape)
    with pytest.raises(CorruptError, match="'w' has other bytes than were saved"):
        un.checkpoint.load(tmp_path, {"w": last})


@pytest.mark.parametrize("kept", [True, False])
def test_ranks_with_the_whole_tensor_and_with_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    tied = {"a": whole, "b": whole}
    un.checkpoint.save(tmp_path, tied)
    monkeypatch.setattr("unisono.checkpoint.storage.LocalStorage.kept", kept)

    def program(comm: un.Communicator) -> None:
        states: list[dict[str, Any]] = [
            {"a": torch.zeros(1000), "b": TensorShard(torch.zeros(50), 20, whole.shape)},
            {"a": TensorShard(torch.zeros(300), 0, whole.shape), "b": TensorShard(torch.zeros(40), 290, whole.shape)},
            {"a": TensorShard(torch.zeros(80)[::2], 7, whole.shape), "b": TensorShard(torch.zeros(0), 7, whole.shape)},
        ]
        for size in (1, 2, 3):
            state = states[(comm.rank + size) % 3]
            un.checkpoint.load(tmp_path, state, comm)
            for value in state.values():
                if isinstance(value, TensorShard):
                    assert torch.equal(value.local, whole[value.start : value.stop])
                else:
                    assert torch.equal(value, whole)

    run_ranks(program, 3)


def test_values_keep_their_meaning_in_another_dtype(tmp_path: Path) -> None:
    whole = torch.randn(6, dtype=torch.float64)
    un.checkpoint.save(tmp_path, {"w": whole})
    state = {"w": TensorShard(torch.zeros(2), 3, whole.shape)}
    un.checkpoint.load(tmp_path, state, map_location="cpu")
    assert torch.equal(state["w"].local, whole[3:5].float())
    for shard, message in (
        (TensorShard(torch.zeros(2).int(), 3, whole.shape), "would change its values"),
        (TensorShard(torch.zeros(2), 3, torch.Size([2, 3])), r"has shape \(6,\) in it, \(2, 3\) here"),
        (TensorShard(torch.zeros(2, device="meta"), 3, whole.shape), "meta device"),
    ):
        with pytest.raises(StateError, match=message):
            un.checkpoint.load(tmp_path, {"w": shard})
    un.checkpoint.save(tmp_path, {"w": [1.0] * 6})
    with pytest.raises(StateError, match="'w' is a TensorShard here, but no tensor in it"):
        un.checkpoint.load(tmp_path, state)
    un.checkpoint.save(tmp_path, [whole, whole + 1])
    with pytest.raises(StateError, match="2 entries in it, 1 here"):
        un.checkpoint.load(tmp_path, [state["w"]])


def test_background_saves_copy_shards(tmp_path: Path) -> None:
    whole = torch.arange(10.0)

    def program(comm: un.Communicator) -> None:
        state = {"w": shard_of(whole, comm.rank, comm.size), "step": 3}
        with Checkpointer(tmp_path, comm, every=1) as checkpointer:
            checkpointer.step(3, state)
            state["w"].local.zero_()
        with Checkpointer(tmp_path, comm) as checkpointer:
            checkpointer.load(state)
        assert torch.equal(state["w"].local, shard_of(whole, comm.rank, comm.size).local)

    run_ranks(program, 2)
    assert torch.equal(un.checkpoint.load(un.checkpoint.latest(tmp_path))["w"], whole)  # type: ignore[arg-type]


def test_a_shard_that_occurs_twice_is_stored_once(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        # Rank 1 has no elements.
        shard = TensorShard(torch.ones(4 if comm.rank == 0 else 0), 4 * comm.rank, torch.Size([4]))
        un.checkpoint.save(tmp_path, {"a": shard, "b": shard}, comm)

    run_ranks(program, 2)
    assert list(un.checkpoint.verify(tmp_path).tensors) == ["a"]


def test_shards_where_they_cannot_be(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        shard = shard_of(torch.arange(4.0), comm.rank, comm.size)
        un.checkpoint.assert_in_sync({"w": shard}, comm)
        for state in ({"w": shard}, {"w": torch.zeros(4)} if comm.rank == 0 else {"w": shard}):
            with pytest.raises(TypeError, match="'w' is a TensorShard, of which no rank has all elements"):
                un.checkpoint.sync(state, comm)
        with pytest.raises(TypeError, match="'w' is a TensorShard in a PerRank value"):
            un.checkpoint.save(tmp_path, {"w": PerRank(shard)}, comm)

    run_ranks(program, 2)


def test_arguments() -> None:
    with pytest.raises(TypeError, match="must be a tensor, not a list"):
        TensorShard([1.0], 0, (1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be 1-d, not of shape \[1, 2\]"):
        TensorShard(torch.zeros(1, 2), 0, (2,))
    for start in (-1, 4):
        with pytest.raises(ValueError, match="not inside a tensor of shape"):
            TensorShard(torch.zeros(2), start, (5,))
    assert repr(TensorShard(torch.zeros(2), 3, (5,))) == "TensorShard(3:5 of [5], torch.float32)"
