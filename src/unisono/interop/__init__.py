"""unisono as a backend of torch.distributed: importing this registers it under the name "unisono".

    import unisono.interop
    dist.init_process_group("unisono")

From then on an existing program runs as it is: collectives, DDP, FSDP, sub-groups, checkpoints. For a
program that also uses GPUs say "cpu:unisono,cuda:nccl".

What gloo has and this backend has not: a receive from any rank; `dist.monitored_barrier`, which torch allows for
gloo by its name (call the group's own method `monitored_barrier`); and DDP's communication hooks that are built
into torch's C++ code (those of `torch.distributed.algorithms.ddp_comm_hooks` work).
"""

from __future__ import annotations

from unisono.interop import comm_hooks
from unisono.interop.options import GroupOptions
from unisono.interop.torch_backend import register

__all__ = ["GroupOptions", "comm_hooks", "register"]

register()
