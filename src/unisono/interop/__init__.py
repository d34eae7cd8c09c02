"""unisono as a backend of torch.distributed, under the name "unisono".

    dist.init_process_group("unisono")

An existing program then runs as it is: collectives, DDP, FSDP, sub-groups, checkpoints. For a program that also
uses GPUs say "cpu:unisono,cuda:nccl". Torch loads the backend itself where unisono is installed; where that is
turned off (TORCH_DEVICE_BACKEND_AUTOLOAD=0), `import unisono.interop` registers it.

What gloo has and this backend has not: `dist.monitored_barrier`, which torch allows for
gloo by its name (call the group's own method `monitored_barrier`); and DDP's communication hooks that are built
into torch's C++ code (those of `torch.distributed.algorithms.ddp_comm_hooks` work).
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
