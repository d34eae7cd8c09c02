"""Shards of tensors: each rank holds a range of elements, and a checkpoint holds the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["TensorShard"]


class TensorShard:
    """Range of elements of a tensor whose other elements are on other ranks.

    In a state passed to `save`, the ranks' shards under one key form one tensor, as if the whole tensor had been saved.
    `load` reads this rank's range into `local`, from any checkpoint that contains the tensor.

    Args:
        local: 1-d tensor with the elements of the flattened (contiguous) tensor from `start` on. May be empty.
        start: Index of the first element in the flattened tensor.
        shape: Shape of the whole tensor.
        replica: Index of this copy, if several ranks have the same elements; copy 0 is saved.

    Raises:
        TypeError: `local` is not a tensor.
        ValueError: `local` is not 1-d, or its range is outside a tensor of this shape.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> def program(comm):
        ...     local = torch.arange(3.0) + 3 * comm.rank
        ...     shard = un.checkpoint.TensorShard(local, 3 * comm.rank, torch.Size([2, 3]))
        ...     un.checkpoint.save(path, {"w": shard}, comm)
        >>> _ = un.launch(program, 2, "thread")
        >>> un.checkpoint.load(path)
        {'w': tensor([[0., 1., 2.],
                [3., 4., 5.]])}
    """

    __slots__ = ("local", "replica", "shape", "start")

    def __init__(self, local: torch.Tensor, start: int, shape: Sequence[int], replica: int = 0) -> None:
        if not isinstance(local, torch.Tensor):
            raise TypeError(f"local must be a tensor, not a {type(local).__name__}")
        self.local: torch.Tensor = local
        self.start: int = start
        self.replica: int = replica
        self.shape: torch.Size = torch.Size(shape)
        if local.ndim != 1:
            raise ValueError(f"local must be 1-d, not of shape {list(local.shape)}; flatten it")
        if not 0 <= start <= self.stop <= self.shape.numel():
            raise ValueError(f"elements {start} to {self.stop} are not inside a tensor of shape {list(self.shape)}")

    @property
    def stop(self) -> int:
        """Index after the last element of `local` in the flattened tensor."""
        return self.start + len(self.local)

    def __repr__(self) -> str:
        """Show the range and the whole tensor's shape."""
        return f"TensorShard({self.start}:{self.stop} of {list(self.shape)}, {self.local.dtype})"
