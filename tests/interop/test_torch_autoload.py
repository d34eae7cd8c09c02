"""Torch finds the backend by its entry point: a program that does not import unisono runs on it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import entry_points

import pytest
import torch.distributed as dist

from unisono.interop import torch_backend

PROGRAM = """
import sys, torch, torch.distributed as dist
loaded = [name for name in sys.modules if name.startswith("unisono")]
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.full((3,), 2.0)
dist.all_reduce(tensor)
print(tensor.sum().item(), *sorted(loaded))
"""
STUB = (
    "6.0 unisono unisono.core unisono.core.compiled_code unisono.core.lazy "
    "unisono.interop unisono.interop.torch_backend"
)


def run(first: str, autoload: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [sys.executable, "-c", f"{first}\n{PROGRAM}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("first", ["", pytest.param("import unisono.interop", marks=pytest.mark.soak)])
def test_backend_is_available_without_an_import(first: str) -> None:
    ended = run(first, "1")
    assert ended.stdout.strip() == STUB, ended.stderr


@pytest.mark.soak
def test_import_registers_the_backend_without_autoload() -> None:
    ended = run("import unisono.interop", "0")
    assert ended.stdout.strip() == STUB, ended.stderr


@pytest.mark.soak
def test_every_module_can_be_imported_before_torch() -> None:
    assert run("import unisono.interop.group, unisono.interop.torch_rpc", "1").stdout.startswith("6.0")


def test_entry_point_is_installed() -> None:
    (ours,) = entry_points(group="torch.backends", name="unisono")
    assert ours.load() is torch_backend.autoload
    # Torch 2.14 and later load it by name.
    (by_name,) = entry_points(group="torch.distributed.backends", name="unisono")
    assert by_name.load() is torch_backend.register


def refused(*_: object, **__: object) -> None:
    raise TypeError("another signature")


def test_failure_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", refused)
    with pytest.warns(RuntimeWarning, match="another signature") as caught:
        torch_backend.autoload()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_backend.autoload()


def test_torch_without_distributed_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", lambda name, *_, **__: registered.append(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_backend.autoload()
    assert (registered, caught) == ([], [])
