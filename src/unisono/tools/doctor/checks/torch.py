"""Check that torch is installed, new enough, and the right build for this host (with or without CUDA)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

from unisono.tools.doctor.examination import Finding, Target, info, ok, optional, problem

__all__ = ["ORDER", "check", "load_torch"]

ORDER = 10
_OLDEST = (2, 8)
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
# Packages that torch's CUDA builds install, and that CPU builds don't need.
_CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
# Checks run in threads, and importing torch in two threads at the same time fails.
_importing = threading.Lock()


def check(target: Target) -> Iterator[Finding]:
    """Import torch, and compare its version and build with this host."""
    fix = f"{sys.executable} -m pip install --upgrade 'torch>={_OLDEST[0]}.{_OLDEST[1]}'"
    try:
        torch = load_torch()
    except (ImportError, OSError) as error:
        yield problem(f"torch cannot be imported: {error}", fix)
        return
    version = torch.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        yield problem(f"torch {version} is too old; use {_OLDEST[0]}.{_OLDEST[1]} or later", fix)
        return
    count = torch.cuda.device_count()
    gpus = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
    yield ok(f"{version}, {gpus}, {torch.get_num_threads()} threads a process")
    # If CUDA_VISIBLE_DEVICES is set, GPUs may be hidden on purpose, so don't conclude anything about the host.
    if not count and "CUDA_VISIBLE_DEVICES" not in os.environ:
        yield from _build(torch, target)


def _build(torch: ModuleType, target: Target) -> Iterator[Finding]:
    """Compare torch's build with the host if torch does not see a GPU."""
    version = torch.__version__.partition("+")[0]
    reinstall = f"{sys.executable} -m pip install --force-reinstall torch=={version}"
    gpu = _nvidia_device()
    if torch.version.cuda and not gpu and not target.requires("nccl"):
        size = _cuda_bytes()
        libraries = f"CUDA's libraries ({size / 1e9:.1f} GB)" if size else "CUDA's libraries"
        yield info(
            f"this build is for CUDA {torch.version.cuda}, and this host has no NVIDIA GPU: {libraries} were installed "
            "for nothing, unless hosts with GPUs use this environment too",
            f"{reinstall} --index-url {_CPU_INDEX}   # then uninstall the packages nvidia-*",
        )
    elif gpu and torch.version.hip is None:
        # A container sees its host's PCI devices even if it has no access to them, so a GPU that torch cannot use is
        # not necessarily a fault.
        obstacle = "cannot use it: see its driver" if torch.version.cuda else "was built without CUDA"
        fix = "nvidia-smi" if torch.version.cuda else reinstall
        yield optional(f"this host has an NVIDIA GPU ({gpu}), but torch {obstacle}", fix)


def _nvidia_device() -> str | None:
    """Return the PCI address of an NVIDIA GPU, whether or not it has a driver; None if the host has none."""
    for device in sorted(_PCI_DEVICES.glob("*")):
        try:
            # Class 0x03 contains display and 3D controllers. Check the class, because NVIDIA's network cards have the
            # same vendor ID.
            if (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith("0x03"):
                return device.name
        except OSError:
            continue
    return None


def _cuda_bytes() -> int:
    """Return how many bytes the CUDA packages take up, according to pip's file lists."""
    packages = [each for each in distributions() if (each.name or "").lower().startswith(_CUDA_PACKAGES)]
    return sum(file.size or 0 for package in packages for file in package.files or ())


def load_torch() -> ModuleType:
    """Import torch with the submodules that this package uses.

    Raises:
        ImportError, OSError: Torch cannot be imported; a missing shared library raises an OSError.
    """
    with _importing:
        import torch
        import torch.distributed

        return torch
