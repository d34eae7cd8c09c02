"""Many small tensors as few long ones: one message a bucket, not one a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

__all__ = ["buckets", "flat_apply"]


def buckets(tensors: Iterable[torch.Tensor], cap_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one dtype and device, each of at most `cap_bytes`, or one tensor that is longer.

    The order is kept within a dtype and device, so that equal models give equal buckets on all ranks.

    Example:
        >>> [[t.numel() for t in b] for b in buckets([torch.zeros(3), torch.zeros(2), torch.zeros(9)], 20)]
        [[3, 2], [9]]
    """
    if cap_bytes < 1:
        raise ValueError(f"a bucket must have room for at least a byte, not {cap_bytes}")
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > cap_bytes:
            yield bucket
            bucket = open_buckets[kind] = []
        bucket.append(tensor)
    yield from (bucket for bucket in open_buckets.values() if bucket)


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
