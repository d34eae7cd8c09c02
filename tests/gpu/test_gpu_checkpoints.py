"""Checkpoints to and from GPUs: what was saved on one kind of device is loaded on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_devices import ALL, CPU, Place
from torch import nn

import unisono as un


def state_on(device: torch.device, fill: float) -> dict[str, Any]:
    """A model, and as in Adam's state a tensor on the device beside one on the CPU."""
    model = nn.BatchNorm1d(5).to(device)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(fill)
    return {"model": model, "average": torch.full((4,), fill, device=device), "step": torch.tensor(fill)}


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [*state["model"].state_dict().values(), state["average"], state["step"]]


def save(comm: un.Communicator, path: str) -> list[torch.Tensor]:
    state = state_on(comm.device, 1.0)
    un.checkpoint.save(path, state, comm)
    return [tensor.cpu() for tensor in tensors(state)]


def load(comm: un.Communicator, path: str) -> tuple[list[torch.Tensor], set[str], str]:
    state = state_on(comm.device, 7.0)
    un.checkpoint.load(path, state, comm)
    found = tensors(state)
    return [tensor.cpu() for tensor in found], {tensor.device.type for tensor in found[:-1]}, found[-1].device.type


@pytest.mark.parametrize("place", ALL)
def test_checkpoint_loads_on_either_device(place: Place, tmp_path: Path) -> None:
    for number, (writer, reader) in enumerate([(place, place), (place, CPU), (CPU, place)]):
        path = str(tmp_path / str(number))
        saved = writer.run(save, path)[0]
        for found, devices, other in reader.run(load, path):
            assert all(map(torch.equal, found, saved))
            assert (devices, other) == ({reader.device}, "cpu")


@pytest.mark.parametrize("place", ALL)
def test_async_save_keeps_a_snapshot(place: Place, tmp_path: Path) -> None:
    def program(comm: un.Communicator, path: str) -> list[float]:
        tensor = torch.ones(1000, device=comm.device)
        handle = un.checkpoint.async_save(path, {"tensor": tensor}, comm)
        tensor.zero_()
        handle.wait()
        un.checkpoint.load(path, {"tensor": tensor}, comm)
        return tensor.unique().tolist()

    assert place.run(program, str(tmp_path / "checkpoint")) == [[1.0]] * place.size
