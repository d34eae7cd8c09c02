"""Packs many small tensors into a few long tensors: buckets for communication, and the layout of sharded parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from unisono.communicator import Communicator, engine_of
from unisono.host.processors import cores

__all__ = [
    "MIB",
    "FlatLayout",
    "ParameterSlice",
    "broadcast_all",
    "bucket_sizes",
    "buckets",
    "dense_strides",
    "flat_apply",
    "in_bytes",
    "plan_buckets",
]

MIB = 1 << 20
_CAP_BYTES = 25 * MIB
_NO_ROOM = "a bucket must hold at least one byte"


def buckets(tensors: Iterable[torch.Tensor], cap_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Group tensors by dtype and device into buckets of at most `cap_bytes`; a larger tensor gets its own bucket.

    Tensors with the same dtype and device keep their order, so equal models give equal buckets on all ranks.

    Example:
        >>> [[t.numel() for t in b] for b in buckets([torch.zeros(3), torch.zeros(2), torch.zeros(9)], 20)]
        [[3, 2], [9]]
    """
    members = list(tensors)
    for indices in plan_buckets(members, range(len(members)), cap_bytes):
        yield [members[i] for i in indices]


def flat_apply(
    bucket: Sequence[torch.Tensor], action: Callable[[torch.Tensor], object], *, keep_on_error: bool = False
) -> None:
    """Apply `action` in place to a whole bucket as one flat tensor.

    Args:
        bucket: The tensors.
        action: Function that changes a flat tensor in place.
        keep_on_error: Whether the tensors must keep their values if the action raises.

    Cost: two copies of the bucket, or none if the bucket is a single contiguous tensor whose values need not be kept.
    """
    if len(bucket) == 1 and bucket[0].is_contiguous() and not keep_on_error:
        action(bucket[0])
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
    action(flat)
    parts = flat.split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def broadcast_all(tensors: Iterable[torch.Tensor], comm: Communicator, src: int = 0, cap_bytes: int = 25 * MIB) -> None:
    """Make tensors equal to rank `src`'s, in place. Collective; all ranks pass matching tensors in the same order.

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


def plan_buckets(
    parameters: Sequence[torch.Tensor], order: Iterable[int], cap_bytes: int, first_bytes: int | None = None
) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, in the order in which buckets become full.

    The parameters of a bucket have one dtype and device. Method: Li et al., "PyTorch Distributed", VLDB 2020,
    section 3.2.2.

    Args:
        parameters: All parameters.
        order: Indices of the parameters to put into buckets, in the expected order of their gradients.
        cap_bytes: Maximum size of a bucket. A larger parameter gets its own bucket.
        first_bytes: Maximum size of the first bucket; if None, `cap_bytes`. A small first bucket can be sent early.

    Raises:
        ValueError: A maximum is less than 1 byte.

    Example:
        >>> plan_buckets([torch.zeros(4), torch.zeros(2), torch.zeros(8)], [2, 1, 0], cap_bytes=24)
        [[2], [1, 0]]
    """
    if cap_bytes < 1 or (first_bytes is not None and first_bytes < 1):
        raise ValueError(_NO_ROOM)
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    # Keep running sums: summing again for each parameter would take seconds with thousands of small parameters.
    lengths: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in order:
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        bucket = filling.get(kind, [])
        limit = cap_bytes if full or first_bytes is None else min(cap_bytes, first_bytes)
        if bucket and lengths[kind] + parameter.nbytes > limit:
            full.append(filling.pop(kind))
            lengths[kind] = 0
        filling.setdefault(kind, []).append(index)
        lengths[kind] = lengths.get(kind, 0) + parameter.nbytes
    return [*full, *filling.values()]


def in_bytes(mebibytes: float | None) -> int | None:
    """Convert a user's size from MiB to bytes. None remains None; infinity means unlimited.

    Raises TypeError for a value that is not a number, and ValueError for a value that is too small.
    """
    if mebibytes is None:
        return None
    if not isinstance(mebibytes, int | float) or mebibytes != mebibytes:
        raise TypeError(f"a bucket's size must be a number of MiB or None, not {mebibytes!r}")
    if (found := int(min(mebibytes * MIB, sys.maxsize)) if mebibytes > 0 else 0) < 1:
        raise ValueError(_NO_ROOM)
    return found


def bucket_sizes(
    given: tuple[int | None, int | None],
    parameters: Sequence[torch.Tensor],
    comm: Communicator,
    *,
    background: bool,
    compressed: bool,
) -> tuple[int, int | None]:
    """Return the maximum size of a bucket, and of the first bucket if different, with defaults for unset sizes.

    Collective. By default, the first bucket is small, and thus sent early, if every rank has a spare core to send it.

    Args:
        given: The maximum sizes of a bucket and of the first bucket; None for a size that the user has not set.
        parameters: All parameters.
        comm: Communicator of the ranks whose gradients are averaged.
        background: Whether buckets are sent while later buckets fill; if not, each bucket adds a wait for the slowest
            rank.
        compressed: Whether a codec is used. A codec needs the same buckets on every machine.
    """
    cap, first = given
    if cap is None:
        cap = _CAP_BYTES if background or compressed else sys.maxsize
    if first is None and background:
        here = next(len(ranks) for ranks in comm.hosts if comm.rank in ranks)
        spare = any(p.device.type != "cpu" for p in parameters) or cores() >= 2 * here
        first = MIB if all(comm.all_gather_object(engine_of(comm).measured("spare cores", lambda: spare))) else None
    return cap, first


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Return a tensor's strides if its memory has no gaps and is not in the usual order; otherwise None.

    Example:
        >>> [dense_strides(t) for t in (torch.ones(2, 3), torch.ones(2, 3).t(), torch.ones(2, 6)[:, ::2])]
        [None, (1, 3), None]
    """
    if parameter.is_contiguous():
        return None
    strides = torch.empty_like(parameter, device="meta").stride()
    return strides if sorted(parameter.stride()) == sorted(strides) else None


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The elements of one parameter that belong to one rank's part of a flat tensor.

    Attributes:
        index: Index of the parameter.
        start: Index of the slice's first element in the flattened parameter.
        numel: Number of elements, at least 1.
        offset: Position of the slice's first element in the rank's part.
    """

    index: int
    start: int
    numel: int
    offset: int


class FlatLayout:
    """Offsets of parameters in a flat tensor of `ranks` equal parts. Elements after the last parameter are padding.

    Args:
        numels: Number of elements of each parameter.
        ranks: Number of parts.

    Attributes:
        offsets: Position of each parameter's first element in the flat tensor.
        part: Number of elements in a part.
        used: Number of elements before the padding.
        total: Number of elements in the flat tensor, including the padding: `used`, rounded up to a multiple of
            `ranks`.

    Method: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    Example:
        >>> layout = FlatLayout([3, 4], ranks=2)
        >>> layout.offsets, layout.part, layout.total
        ([0, 3], 4, 8)
        >>> layout.slices(0)
        [ParameterSlice(index=0, start=0, numel=3, offset=0), ParameterSlice(index=1, start=0, numel=1, offset=3)]
        >>> layout.slices(1)
        [ParameterSlice(index=1, start=1, numel=3, offset=0)]
    """

    def __init__(self, numels: Sequence[int], ranks: int) -> None:
        offsets = list(accumulate(numels, initial=0))
        self.used: int = offsets.pop()
        self.offsets: list[int] = offsets
        self.part: int = -(-self.used // ranks)
        self.total: int = self.part * ranks
        self._numels = numels

    def views(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view of each parameter in a flat tensor, with the shapes of `like`."""
        places = zip(self.offsets, like, strict=False)
        return [flat[start : start + parameter.numel()].view(parameter.shape) for start, parameter in places]

    def part_of(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part of a flat tensor."""
        return flat[rank * self.part :][: self.part]

    def slices(self, rank: int) -> list[ParameterSlice]:
        """Return the parameter slices in a rank's part, in order."""
        low = rank * self.part
        high = (rank + 1) * self.part
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self._numels, strict=True)):
            first = max(offset, low)
            stop = min(offset + numel, high)
            if first < stop:
                found.append(ParameterSlice(index, first - offset, stop - first, first - low))
        return found
