"""Finds a model's named parameters, compares them between ranks, and reserves their gradients for one owner."""

from __future__ import annotations

import os
import secrets
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import is_
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
from torch.nn.utils import stateless

from unisono.communicator import Communicator, engine_of
from unisono.core.flight_recorder import with_callers
from unisono.core.load_hook import announce_load
from unisono.core.staging import ACCELERATORS
from unisono.core.tensors import check_tensor, is_non_overlapping
from unisono.serialization.tensors import has_no_storage
from unisono.utils.flatten import MIB, broadcast_all, dense_strides

__all__ = [
    "INIT_SYNC",
    "Model",
    "ModelMembers",
    "Named",
    "ParameterClaim",
    "agree_on_parameters",
    "check_parameters",
    "check_unclaimed",
    "claim",
    "in_functional_call",
    "named_tensors",
    "release",
    "share",
    "share_buffers",
    "warn_of_norm_limits",
]

_TOKEN = secrets.token_hex(8)
"""Random mark of this process and its forks. The PID is not enough: it may be the same in two containers."""

Named = list[tuple[str, torch.Tensor]]

Model = torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A module, its `parameters()`, or its `named_parameters()`."""


def named_tensors(model: Model, *, buffers: bool = False) -> Named:
    """Return a model's parameters with their names, each only once; tensors without names are named by position.

    Raises:
        TypeError: `model` is a single tensor, or contains something other than tensors.
        ValueError: `model` is an exhausted iterator, or `buffers` is set and `model` is not a module.

    Example:
        >>> [name for name, _ in named_tensors(torch.nn.BatchNorm1d(2), buffers=True)]
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
        >>> [name for name, _ in named_tensors([torch.zeros(2), torch.ones(1)])]
        ['parameter 0', 'parameter 1']
    """
    if isinstance(model, torch.nn.Module):
        return [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    if buffers:
        raise ValueError("buffers=True needs the module itself, not its parameters")
    if isinstance(model, torch.Tensor) or not isinstance(model, Iterable):
        raise TypeError(f"model must be a module or a list of parameters, not a single {type(model).__name__}")
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for index, entry in enumerate(model):
        name, tensor = entry if isinstance(entry, tuple) else (f"parameter {index}", entry)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        found.setdefault(id(tensor), (name, tensor))
    if not found and isinstance(model, Iterator):
        raise ValueError("model has no parameters: it is an exhausted iterator. Pass the module, or a list")
    return list(found.values())


class ModelMembers:
    """A record of a model's modules and parameters, for cheap detection of changes.

    Args:
        model: The module. An object that is not a module is ignored.
        named: The parameters that the owner (such as an averager) knows, with their names.

    Cost: `problem` takes about 0.1 us per parameter while nothing has changed, a tenth of the time to walk through the
    modules.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> members = ModelMembers(model, list(model.named_parameters()))
        >>> model[0].bias = torch.nn.Parameter(torch.zeros(1))
        >>> members.problem()
        "'0.bias' was replaced by a new parameter later, so its gradient is not averaged"
    """

    def __init__(self, model: object, named: Named) -> None:
        self._model = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
        self._named = named
        # `_named` keeps the parameters alive, so that no other object can get one of these ids.
        self._ids = {id(p) for _, p in named}
        self._take()

    def _take(self) -> None:
        modules = list(self._model.modules())
        tables = [t for m in modules for t in (m._parameters, m._modules) if isinstance(t, dict)]
        self._empty = [table for table in tables if not table]
        self._held = [table.values() for table in tables if table]
        self._members = list(chain.from_iterable(self._held))
        self._unknown = [p for p in self._model.parameters() if id(p) not in self._ids]

    def __getstate__(self) -> NoReturn:
        raise TypeError("what follows a model is of this process: it can be neither pickled nor copied")

    def problem(self) -> str | None:
        """Describe the parameters that need a gradient but are unknown to the owner; return None if there are none."""
        # Compare with the record first, which is cheap: walking through the modules would slow down every step.
        same = (
            all(map(is_, chain.from_iterable(self._held), self._members))
            and sum(map(len, self._held)) == len(self._members)
            and not any(self._empty)
            and not (self._unknown and any(p.requires_grad for p in self._unknown))
        )
        if same or in_functional_call():
            return None
        new = [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in self._ids]
        if not new:
            # Neither moving a parameter to another module nor adding a frozen parameter is a problem.
            self._take()
            return None
        how = "replaced by a new parameter" if new[0] in dict(self._named) else "added to the model"
        more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        return f"{new[0]!r}{more} was {how} later, so its gradient is not averaged"


def in_functional_call() -> bool:
    """Return whether `torch.func.functional_call` has temporarily put other tensors into the model."""
    return any(frame.f_code.co_filename == stateless.__file__ for frame in with_callers(sys._getframe()))


def check_parameters(named: Named) -> None:
    """Raise an error unless every parameter has elements that ranks can send and an optimizer can write.

    Raises:
        ValueError: A parameter (named in the error) is uninitialized, on the meta device, the result of a computation,
            or a Tensor subclass without its own elements.

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
    """Warn about embeddings with `max_norm`: each rank renormalizes only rows that its own data uses, so ranks diverge.

    Args:
        model: A module; anything else is ignored.

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


def agree_on_parameters(
    named: Named,
    comm: Communicator,
    settings: Mapping[str, object] | None = None,
    *,
    of: str = "the model",
    frozen: bool = True,
    hooked: bool = False,
) -> None:
    """Raise `MismatchError` on every rank if parameters or settings differ. Collective; `comm` remains usable.

    Args:
        named: The parameters, whose names, shapes, dtypes, memory orders and device types are compared.
        comm: Communicator of the ranks.
        settings: Other values that must be equal on all ranks, by name.
        of: Name of the object with these settings and parameters, for error messages.
        frozen: Whether to compare which parameters are frozen.
        hooked: Whether hooks will wait for other ranks in backward passes. If waits in the hooks would deadlock, every
            rank raises `ValueError`.

    Cost: one `flush_agreements`, and one exchange of the devices' names if `hooked` is set and there are accelerators.
    """
    kinds = [(name, _described(p, frozen=frozen)) for name, p in named]
    comm.agree(settings, f"settings of {of}")
    comm.agree(dict(kinds), f"parameters of {of}")
    # Also compare `kinds` as a list, because a dict drops repeated names.
    comm.agree(kinds, f"order of the parameters of {of}")
    comm.flush_agreements()
    threads = engine_of(comm).measured("threads", partial(_backward_threads, named if hooked else []))
    users: dict[str, int] = {}
    for rank, theirs in enumerate(comm.all_gather_object(threads) if threads else ()):
        for thread in theirs:
            if users.setdefault(thread, rank) != rank:
                raise ValueError(
                    f"ranks {users[thread]} and {rank} are threads of one process with parameters on "
                    f"{thread.split()[-1]}. Torch runs the backward passes of both in one thread, in which one would "
                    "wait for the other. Use ranks that are processes, as on backend 'shm', or a device for each rank"
                )


def _backward_threads(named: Named) -> list[str]:
    """Return a name for each thread in which torch runs backward passes on accelerators: one per process and device."""
    devices = dict.fromkeys(p.device for _, p in named if p.device.type in ACCELERATORS)
    return [f"{_TOKEN} {os.getpid()} {device}" for device in devices]


def _described(p: torch.Tensor, *, frozen: bool) -> str:
    text = f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)} on {p.device.type}"
    if p.layout != torch.strided or not is_non_overlapping(p):
        text += f", {p.layout}, {p.layout == torch.strided and p.stride()}"
    elif (strides := dense_strides(p)) is not None:
        text += f" with strides {strides}"
    return f"{text}, frozen" if frozen and not p.requires_grad else text


class ParameterClaim:
    """Claim on parameters, which keeps the parameters alive, and ends when the owner of the claim is freed."""

    def __init__(self, named: Named, text: str) -> None:
        self.named = named
        self.text = text


_CLAIMS: WeakValueDictionary[int, ParameterClaim] = WeakValueDictionary()
"""Claims by `id` of the parameter. With weak references as keys, torch could not swap the parameters."""


def claim(named: Named, how: str, owner: str) -> ParameterClaim:
    """Claim parameters until `release`, or until the returned claim is dropped.

    Args:
        named: Parameters, with their names.
        how: What the owner does with the parameters, as a participle for error messages, such as "averaged".
        owner: Name of the owner's class.

    Returns: The claim, to which the owner must keep a reference.

    Raises:
        ValueError: A parameter (named in the error) is already claimed; the call claims none of the parameters.

    Example:
        >>> from unisono.utils.parameters import claim
        >>> model = torch.nn.Linear(2, 1)
        >>> kept = claim(list(model.named_parameters()), "averaged", "GradientAverager")
        >>> claim(list(model.named_parameters()), "sharded", "ShardedModel")
        Traceback (most recent call last):
        ...
        ValueError: 'weight' is averaged by another GradientAverager; call its remove() first
    """
    check_unclaimed(named)
    found = ParameterClaim(named, f"{how} by another {owner}")
    for _, parameter in named:
        _CLAIMS[id(parameter)] = found
    return found


def check_unclaimed(named: Named) -> None:
    """Raise `ValueError` if one of these parameters is claimed."""
    for name, parameter in named:
        if found := _CLAIMS.get(id(parameter)):
            raise ValueError(f"{name!r} is {found.text}; call its remove() first")


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Release the claims on these parameters. Idempotent."""
    for parameter in parameters:
        _CLAIMS.pop(id(parameter), None)


def share(
    named: Named, comm: Communicator, src: int = 0, cap_bytes: int = 25 * MIB, *, model: object = None, hint: str = ""
) -> None:
    """Call `broadcast_all` on named tensors, after checking that they can be written to.

    Args:
        named, comm, src, cap_bytes: As for `broadcast_all`.
        model: The module that owns the tensors, or None. Objects registered with `follow_loads` are notified of the new
            values.
        hint: Text that follows a buffer's name in error messages.

    Raises:
        ValueError: A tensor (named in the error) cannot be written to, because it is sparse or its elements share
            memory.
    """
    for name, tensor in named:
        text = repr(name) if isinstance(tensor, torch.nn.Parameter) else f"{name!r}{hint}"
        check_tensor(tensor, text, frozenset([tensor.device.type]), written=True)
    broadcast_all([tensor for _, tensor in named], comm, src, cap_bytes)
    announce_load(model)


INIT_SYNC = " (which init_sync=False does not broadcast)"
"""The `hint` for `share` if its caller has an argument `init_sync`."""


def share_buffers(model: torch.nn.Module, comm: Communicator, src: int = 0) -> None:
    """Make a module's buffers equal to rank `src`'s. Collective.

    If the graph of an earlier forward pass refers to a buffer, the buffer is replaced, so that the backward pass finds
    the old values.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer._use_count() > 1:  # type: ignore[attr-defined]
                replaced.setdefault(id(buffer), (buffer, buffer.clone()))
            if id(buffer) in replaced:
                setattr(module, name, replaced[id(buffer)][1])
    broadcast_all(model.buffers(), comm, src)
