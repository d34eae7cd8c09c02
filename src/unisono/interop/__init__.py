"""unisono as a backend of torch.distributed, under the name "unisono".

    dist.init_process_group("unisono")

With this backend, an existing program runs unchanged, including collectives, DDP, FSDP, sub-groups and checkpoints. A
program that also uses GPUs passes "cpu:unisono,cuda:nccl". Torch loads the backend itself if unisono is installed; if
autoloading is disabled (TORCH_DEVICE_BACKEND_AUTOLOAD=0), `import unisono.interop` registers it.

Two features of gloo are missing. `dist.monitored_barrier` works only for a backend called gloo; call the group's method
`monitored_barrier` instead. The DDP communication hooks that are built into torch's C++ code do not work; use those in
`torch.distributed.algorithms.ddp_comm_hooks`.
"""

from typing import TYPE_CHECKING

from unisono.core.lazy import load_on_use
from unisono.interop.torch_backend import autoload, register

if TYPE_CHECKING:
    from unisono.interop import comm_hooks
    from unisono.interop.call_watch import watch
    from unisono.interop.options import GroupOptions

__all__ = ["GroupOptions", "comm_hooks", "register", "watch"]

__getattr__, __dir__ = load_on_use(
    __name__,
    {"unisono.interop.call_watch": "watch", "unisono.interop.options": "GroupOptions"},
    ["unisono.interop.comm_hooks"],
)

autoload()
