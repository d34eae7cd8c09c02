"""Parts of a state: objects with `state_dict`, values, and per-rank values."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from unisono.checkpoint.tree import Node, Packer
from unisono.core.tensor_shard import TensorShard

__all__ = ["RNG", "Captured", "PerRank", "Policy", "capture", "is_stateful", "parameters_of", "per_rank_of"]

Policy = Literal["modulo", "keep", "shared", "all", "refuse"]
_POLICIES = ("modulo", "keep", "shared", "all", "refuse")


class PerRank:
    """Marker of a value of a state that differs between ranks: each rank saves its own, and loads it again.

    Samplers and data loaders, random generators, `GradientAverager` and codecs need no marker.

    Args:
        obj: Any value that a state may hold.
        on_resize: Policy when a checkpoint of p ranks is loaded by another number of ranks. "modulo": rank r
            loads the value of rank r mod p. "keep": ranks from p on keep their value. "shared": as "modulo", because
            the value of one rank is valid on any other (a data loader's state); `sync` sends it, too. "all": as
            "shared", but `load_state_dict` gets the list of all p values (`PartitionSampler` accepts a list).
            "refuse": an error.

    Raises:
        ValueError: `on_resize` is none of these.

    Example:
        >>> def program(comm, path):
        ...     un.checkpoint.save(path, {"mine": un.checkpoint.PerRank(comm.rank * 10)}, comm)
        ...     return un.checkpoint.load(path, {"mine": un.checkpoint.PerRank(None)}, comm)["mine"].obj
        >>> import tempfile
        >>> un.launch(program, 2, "thread", (tempfile.mkdtemp(),))
        [0, 10]
    """

    def __init__(self, obj: Any, on_resize: Policy = "modulo") -> None:
        if on_resize not in _POLICIES:
            raise ValueError(f"on_resize must be one of {', '.join(map(repr, _POLICIES))}, not {on_resize!r}")
        self.obj = obj
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.obj!r}, {self.on_resize!r})"


class RNG:
    """The global random generators of this process: torch's (CPU, and CUDA where it is used), Python's, numpy's.

    Put one into a state: each rank saves and gets back its own. Ranks that are threads share these generators.
    Loaded by more ranks than saved it, the further ones keep the random state that they have.

    Example:
        >>> saved = un.checkpoint.RNG().state_dict()
        >>> first = torch.rand(1)
        >>> un.checkpoint.RNG().load_state_dict(saved)
        >>> bool(torch.rand(1) == first)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, by library: "python", "torch", "cuda" and "numpy" where in use."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators from a state; those of CUDA and numpy stay unchanged if the state lacks them.

        Args:
            state: Result of `state_dict`. States of more CUDA devices than there are here are ignored.
        """
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(one.cpu(), device)
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(state["numpy"])


def is_stateful(value: Any) -> bool:
    """Return whether the value has both `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def per_rank_of(value: Any) -> PerRank | None:
    """The value as a `PerRank`, if it is one or of a kind that always is."""
    if isinstance(value, PerRank):
        return value
    if isinstance(value, (RNG, torch.Generator)):
        return PerRank(value, "keep")
    if is_stateful(value) and not isinstance(value, torch.nn.Module):
        if _is_a(value, "unisono.data.sampler", "PartitionSampler"):
            return PerRank(value, "all")
        if isinstance(value, (torch.utils.data.Sampler, torch.utils.data.DataLoader)):
            return PerRank(value, "shared")
        if _is_a(value, "unisono.gradients.averager", "GradientAverager") or _is_a(
            value, "unisono.compression.codec", "Codec"
        ):
            return PerRank(value, "keep")
    return None


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether the value is an instance of a class; a module that is not imported has no instances."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


@dataclass
class Captured:
    """A state taken apart: trees and tensors, common ones and those of this rank.

    Attributes:
        tree, tensors: The part that is the same on every rank.
        shards: The `TensorShard`s among them; their tensors are the local ones.
        own_trees, own_tensors: This rank's part; the names of its tensors begin with "@rank.".
    """

    tree: Node = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, TensorShard] = field(default_factory=dict)
    own_trees: Sequence[Node] = ()
    own_tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Size, str | None]]:
    """Return each parameter with its shape and the name that the optimizer knows, of the whole one if it has a part."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if pieces := getattr(optimizer, "pieces", None):
        return [(p, piece.shape, piece.name) for p, piece in zip(parameters, pieces, strict=True)]
    names = [n for group in optimizer.param_groups for n in group.get("param_names") or [None] * len(group["params"])]
    return [(p, p.shape, name) for p, name in zip(parameters, names, strict=True)]


def capture(state: Any, rank: int) -> Captured:
    """Take a state apart, without copying tensors.

    Raises:
        TypeError: A value in it cannot be saved; the message names the value and its place.
    """
    mine: list[tuple[str, PerRank]] = []

    def special(packer: Packer, value: Any, path: str, depth: int) -> Node | None:
        own = per_rank_of(value)
        if own is not None:
            mine.append((path, own))
            return {"$rank": [len(mine) - 1, own.on_resize]}
        return _object(packer, value, path, depth)

    packer = Packer(special)
    tree = packer.pack(state)
    inner = Packer(_object, prefix=f"@{rank}.")
    trees = [inner.pack(own.obj, path) for path, own in mine]
    for optimizer, body in (*packer.optimizers, *inner.optimizers):
        body.append(
            [
                packer.name_of(p) or inner.name_of(p) or name or list(shape)
                for p, shape, name in parameters_of(optimizer)
            ]
        )
    for name in inner.shards:
        raise TypeError(
            f"{name.removeprefix(f'@{rank}.')!r} is a TensorShard in a PerRank value, but all ranks save it together"
        )
    return Captured(tree, packer.tensors, packer.shards, trees, inner.tensors)


def _object(packer: Packer, value: Any, path: str, depth: int) -> Node | None:
    if isinstance(value, torch.Generator):
        return {"$generator": packer.keep(value.get_state(), path)}
    if not callable(getattr(value, "state_dict", None)) or isinstance(value, type):
        return None
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    state = value.state_dict()
    body = [kind, packer.pack(state, path, depth + 1)]
    known = getattr(state, "_metadata", None)
    if isinstance(known, dict):
        # By its version a module knows whether what it loads is of an older form. Most have 1, which is not written.
        versions = {name: one for name, one in known.items() if one != {"version": 1}}
        body.append(packer.pack(versions, f"{path}._metadata", depth + 1))
    elif isinstance(value, torch.optim.Optimizer):
        packer.optimizers.append((value, body))
    return {"$state": body}
