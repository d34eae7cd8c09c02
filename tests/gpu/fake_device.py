"""A device "fake" for torch on hosts without a GPU: its build, and its entry point, which `import torch` calls."""

from __future__ import annotations

import hashlib
import subprocess
import types
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["NAME", "build", "counts", "fail", "load"]

NAME = "fake"
SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = Path(__file__).parents[2] / ".cache" / "fake-device"


def build(limit_s: float) -> Path:
    """Compile it for this torch, unless that is done; return the folder that makes `import torch` load it."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    entry = BUILT / "fake_device-1.dist-info"
    entry.mkdir(parents=True, exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-device\nVersion: 1\n")
    (entry / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = {__name__}:load\n")
    library = _library()
    if not library.exists():
        part = library.with_suffix(".part")
        compiler = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(part)]
        compiler += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        compiler += [f"-isystem{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
        subprocess.run([*compiler, "-lc10", "-ltorch_cpu"], check=True, timeout=limit_s)
        part.replace(library)
    return BUILT


def _library() -> Path:
    import torch

    return BUILT / f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}-{torch.__version__}.so"


def load() -> None:
    """Register the device with torch."""
    import torch

    torch.ops.load_library(_library())
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        device_count=torch.ops.fake_device.device_count,
        current_device=torch.accelerator.current_device_index,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


def counts() -> list[int]:
    """The waits of this process for a stream, its waits for all streams, and its copies without pinned memory."""
    import torch

    found: list[int] = torch.ops.fake_device.counts()
    return found


def fail(tensor: torch.Tensor, reason: str) -> None:
    """Queue work on a tensor that fails, as a kernel whose assertion does; each later wait raises its error."""
    import torch

    torch.ops.fake_device.fail(tensor, reason)
