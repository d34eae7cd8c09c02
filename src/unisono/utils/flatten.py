"""Many small tensors as few long ones: one message a bucket, not one a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from unisono.communicator import Communicator
from unisono.core.tensors import check_tensor
from unisono.utils.bucket_plan import MIB, Named, plan_buckets

__all__ = ["broadcast_all", "buckets", "flat_apply", "share", "share_buffers"]


def buckets(tensors: Iterable[torch.Tensor], cap_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one dtype and device, each of at most `cap_bytes`, or one tensor that is longer.

    The order is kept within a dtype and device, so that equal models give equal buckets on all ranks.

    Example:
        >>> [[t.numel() for t in b] for b in buckets([torch.zeros(3), torch.zeros(2), torch.zeros(9)], 20)]
        [[3, 2], [9]]
    """
    members = list(tensors)
    for indices in plan_buckets(members, range(len(members)), cap_bytes):
        yield [members[i] for i in indices]


def flat_apply(bucket: Sequence[torch.Tensor], action: Callable[[torch.Tensor], object]) -> None:
    """Let `action` work in place on all of a bucket as one flat tensor.

    Cost: two copies of the bucket; none if it holds one contiguous tensor.
    """
    if len(bucket) == 1 and bucket[0].is_contiguous():
        action(bucket[0])
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
    action(flat)
    parts = flat.split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def broadcast_all(tensors: Iterable[torch.Tensor], comm: Communicator, src: int = 0, cap_bytes: int = 25 * MIB) -> None:
    """Make tensors equal to rank `src`'s, in place. Collective; all ranks pass the same ones in the same order.

    Example:
        >>> def program(comm):
        ...     tensors = [torch.ones(2) * comm.rank, torch.ones(1) * comm.rank]
        ...     broadcast_all(tensors, comm, 1)
        ...     return [t.tolist() for t in tensors]
        >>> import unisono as un
        >>> un.launch(program, nprocs=2, backend="thread")[0]
        [[1.0, 1.0], [1.0]]
    """
    with torch.no_grad():
        for bucket in buckets(tensors, cap_bytes):
            flat_apply(bucket, lambda flat: comm.broadcast(flat, src))


def share(named: Named, comm: Communicator, src: int = 0, cap_bytes: int = 25 * MIB) -> None:
    """Call `broadcast_all` on tensors with names.

    Raises:
        ValueError: One cannot be written to, since it is sparse or its elements share memory; names it.
    """
    for name, tensor in named:
        check_tensor(tensor, repr(name), frozenset([tensor.device.type]), written=True)
    broadcast_all([tensor for _, tensor in named], comm, src, cap_bytes)


def share_buffers(model: torch.nn.Module, comm: Communicator, src: int = 0) -> None:
    """Make a module's buffers equal to rank `src`'s. Collective.

    A buffer that the graph of another forward holds is replaced, so that its backward pass finds the old values.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer._use_count() > 1:  # type: ignore[attr-defined]
                replaced.setdefault(id(buffer), (buffer, buffer.clone()))
            if id(buffer) in replaced:
                setattr(module, name, replaced[id(buffer)][1])
    broadcast_all(model.buffers(), comm, src)
