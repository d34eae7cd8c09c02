"""Assignment of parameters to messages: the bucketer, which can be used alone."""

from __future__ import annotations

import os
import secrets
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from unisono.communicator import Communicator
from unisono.core.staging import ACCELERATORS
from unisono.core.tensors import is_non_overlapping
from unisono.errors import MismatchError
from unisono.host.processors import cores
from unisono.serialization.tensors import has_no_storage

__all__ = [
    "MIB",
    "Named",
    "agree_on_parameters",
    "bucket_sizes",
    "check_parameters",
    "dense_strides",
    "in_bytes",
    "named_parameters",
    "plan_buckets",
    "warn_of_norm_limits",
]

MIB = 1 << 20
_CAP_BYTES = 25 * MIB
_TOKEN = secrets.token_hex(8)
"""Mark of this process and its forks: processes of two containers may have one number."""
_NO_ROOM = "a bucket must hold at least one byte"

Named = list[tuple[str, torch.Tensor]]


def named_parameters(model: torch.nn.Module | Iterable[torch.Tensor]) -> Named:
    """Each parameter once, with its name, or with its place in a list."""
    if isinstance(model, torch.Tensor) or not isinstance(model, torch.nn.Module | Iterable):
        raise TypeError(f"model must be a module or a list of parameters, not a single {type(model).__name__}")
    if isinstance(model, torch.nn.Module):
        return list(model.named_parameters())
    found = {id(p): (f"parameter {i}", p) for i, p in reversed(list(enumerate(model)))}
    if not found and isinstance(model, Iterator):
        raise ValueError("model is an exhausted iterator. Pass the module, or a list")
    named = list(reversed(found.values()))
    for name, parameter in named:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"{name} is a {type(parameter).__name__}, not a tensor")
    return named


def check_parameters(named: Named) -> None:
    """Raise unless each parameter has elements that ranks can send, and that an optimizer can write.

    Raises:
        ValueError: One is uninitialized, on the meta device, the result of a computation, or a subclass of Tensor whose
            elements are not in its own memory; names it.

    Example:
        >>> check_parameters([("weight", torch.ones(2, device="meta"))])
        Traceback (most recent call last):
        ...
        ValueError: 'weight' is on the meta device, which holds no elements. Call model.to_empty(device=...), ...
    """
    for name, parameter in named:
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name!r} is uninitialized (a lazy module). Run a forward of the model first")
        if parameter.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, which holds no elements. Call model.to_empty(device=...), and "
                "initialize or load the parameters, first"
            )
        if not parameter.is_leaf:
            raise ValueError(f"{name!r} is the result of a computation; pass what it was computed from")
        if type(parameter) not in (torch.Tensor, torch.nn.Parameter) and has_no_storage(parameter):
            raise ValueError(
                f"{name!r} is a {type(parameter).__name__}, whose elements are not in its own memory, so ranks cannot "
                "send them. Use plain parameters, or those that it holds, such as dtensor.to_local()"
            )


def warn_of_norm_limits(model: object) -> None:
    """Warn of embeddings whose forward writes their weight: rows of the rank's own data, so that ranks drift apart.

    Args:
        model: A module; of anything else nothing is known.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     warn_of_norm_limits(torch.nn.Embedding(3, 2, max_norm=1.0))
        >>> len(caught)
        1
    """
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    names = [f"{name}.weight".removeprefix(".") for name, module in modules if getattr(module, "max_norm", None)]
    if names:
        warnings.warn(
            f"a forward writes {', '.join(map(repr, names))} (max_norm): rows of its own data, so that ranks drift "
            "apart. Limit the norms on all ranks alike, after optimizer.step()",
            stacklevel=3,
        )


def plan_buckets(
    parameters: Sequence[torch.Tensor], order: Iterable[int], cap_bytes: int, first_bytes: int | None = None
) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, in the order in which buckets become full.

    The parameters of a bucket have one dtype and device. Method: Li et al., "PyTorch Distributed", VLDB 2020,
    section 3.2.2.

    Args:
        parameters: All parameters.
        order: Indices of the parameters that take part, in the expected order of their gradients.
        cap_bytes: Maximum size of a bucket, unless it holds a single parameter.
        first_bytes: Maximum size of the first bucket, if it should be small so that it starts early.

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
    # Running sums: summing again for each parameter would take seconds for some thousand short ones.
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
    """Return a user's size in bytes, None for None; infinity is no limit.

    Raises TypeError for a value that is no number, ValueError for one that is too small.
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
    """Maximum bytes of a bucket, and of the first one if that differs, with defaults for values not set by the user.

    Collective. A small first bucket starts early if each rank has a spare core for it.

    Args:
        given: Values set by the user, or None.
        parameters: All parameters.
        comm: The ranks that average.
        background: Whether buckets are sent while others fill. If not, each bucket adds a wait for the slowest rank.
        compressed: Whether a codec makes the messages: it needs the same buckets on every machine.
    """
    cap, first = given
    if cap is None:
        cap = _CAP_BYTES if background or compressed else sys.maxsize
    if first is None and background:
        here = next(len(ranks) for ranks in comm.hosts if comm.rank in ranks)
        spare = any(p.device.type != "cpu" for p in parameters) or cores() >= 2 * here
        first = MIB if all(comm.all_gather_object(spare)) else None
    return cap, first


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of the elements in memory, if these have no gaps and are not the usual ones; else None.

    Example:
        >>> [dense_strides(t) for t in (torch.ones(2, 3), torch.ones(2, 3).t(), torch.ones(2, 6)[:, ::2])]
        [None, (1, 3), None]
    """
    if parameter.is_contiguous():
        return None
    strides = torch.empty_like(parameter, device="meta").stride()
    return strides if sorted(parameter.stride()) == sorted(strides) else None


def agree_on_parameters(
    named: Named, comm: Communicator, settings: Sequence[object] = (), *, frozen: bool = True, hooked: bool = False
) -> None:
    """`MismatchError` on every rank if ranks have different parameters, or settings. Collective.

    With `frozen=False` it does not matter which ones are frozen. With `hooked`, hooks will wait for other ranks in
    backward passes: `ValueError` on every rank if that would block those ranks themselves.
    """
    card = [
        [name, list(p.shape), str(p.dtype), p.device.type, p.requires_grad or not frozen, _order(p)]
        for name, p in named
    ]
    threads = _backward_threads(named) if hooked else []
    cards = comm.all_gather_object([card, [str(s) for s in settings], threads])
    users: dict[str, int] = {}
    for rank, (theirs, choices, threads) in enumerate(cards):
        problem = _difference(cards[0][0], theirs, rank)
        if problem is None and choices != cards[0][1]:
            problem = f"settings are {cards[0][1]} on rank 0 and {choices} on rank {rank}"
        if problem is not None:
            raise MismatchError(
                f"rank {rank} has another model than rank 0: {problem}. All ranks must create the same model",
                rank=comm.rank,
                size=comm.size,
                peer=rank,
            )
        for thread in threads:
            if users.setdefault(thread, rank) != rank:
                raise ValueError(
                    f"ranks {users[thread]} and {rank} are threads of one process with parameters on "
                    f"{thread.split()[-1]}. Torch runs the backward passes of both in one thread, in which one would "
                    "wait for the other. Use ranks that are processes, as on backend 'shm', or a device for each rank"
                )


def _backward_threads(named: Named) -> list[str]:
    """Return a name of each thread in which torch runs backward passes on accelerators: one a process and device."""
    devices = dict.fromkeys(p.device for _, p in named if p.device.type in ACCELERATORS)
    return [f"{_TOKEN} {os.getpid()} {device}" for device in devices]


def _order(p: torch.Tensor) -> str:
    """Return the memory order of a parameter's elements as text; "None" for the usual one."""
    if p.layout != torch.strided or not is_non_overlapping(p):
        return f"{p.layout}, {p.layout == torch.strided and p.stride()}"
    return str(dense_strides(p))


def _difference(first: Sequence[Sequence[object]], other: Sequence[Sequence[object]], rank: int) -> str | None:
    for one, two in zip(first, other, strict=False):
        if list(one) != list(two):
            return f"{_quoted(one)} on rank 0, {_quoted(two)} on rank {rank}"
    if len(first) != len(other):
        extra = max(first, other, key=len)[min(len(first), len(other))]
        return f"{len(first)} parameters on rank 0, {len(other)} on rank {rank}; {_quoted(extra)} is on one rank only"
    return None


def _quoted(card: Sequence[object]) -> str:
    name, shape, dtype, device, trained, strides = card
    kind = f"{str(dtype).removeprefix('torch.')} {shape} on {device}"
    if strides != "None":
        kind += f" with strides {strides}"
    return f"{name!r} is {kind}" + ("" if trained else ", frozen")
