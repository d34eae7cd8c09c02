"""unisono as a backend of torch.distributed, under the name "unisono".

    dist.init_process_group("unisono")

An existing program then runs unchanged: collectives, DDP, FSDP, sub-groups, checkpoints. A program that also uses GPUs
passes "cpu:unisono,cuda:nccl". Torch loads the backend itself if unisono is installed; if autoloading is disabled
(TORCH_DEVICE_BACKEND_AUTOLOAD=0), `import unisono.interop` registers it.

Two features of gloo are missing. `dist.monitored_barrier` works only for a backend called gloo; call the group's method
`monitored_barrier` instead. The DDP communication hooks that are built into torch's C++ code do not work either; use
those in `torch.distributed.algorithms.ddp_comm_hooks`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.interop.torch_backend import autoload, register

if TYPE_CHECKING:
    from unisono.interop import comm_hooks
    from unisono.interop.call_watch import watch
    from unisono.interop.options import GroupOptions

__all__ = ["GroupOptions", "comm_hooks", "register", "watch"]


def __getattr__(name: str) -> Any:
    if name == "comm_hooks":
        return importlib.import_module("unisono.interop.comm_hooks")
    if name == "GroupOptions":
        from unisono.interop.options import GroupOptions

        return GroupOptions
    if name == "watch":
        from unisono.interop.call_watch import watch

        return watch
    raise AttributeError(f"module 'unisono.interop' has no attribute {name!r}")


autoload()
