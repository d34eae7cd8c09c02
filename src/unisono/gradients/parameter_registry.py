"""The parameters that an averager has hooked, and their comparison with the model's current parameters."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from unisono.utils.parameters import (
    ModelMembers,
    Named,
    check_parameters,
    check_unclaimed,
    claim,
    in_functional_call,
    release,
)

__all__ = ["ParameterRegistry", "hook_forward", "hook_gradient"]

_implementation = attrgetter("_cdata")
_dtype = attrgetter("dtype")
_version = attrgetter("_version")


_Paused = list[tuple[dict[int, Any], int, Any]]
"""Hooks of submodules that are paused during a forward of the model: each hook's table, its key there, and the hook."""


class ParameterRegistry:
    """The parameters of one averager.

    A hook belongs to a tensor's C++ implementation, not to its name in the model. So a parameter that was replaced,
    swapped or added is not averaged, and no tensor hook can detect that. Instead, the modules' current parameters are
    compared with the registered parameters before each forward of the model, before each forward of a submodule that is
    called separately, and whenever `check` is called.

    Args:
        model: The module; None for parameters without a module.
        named: The parameters, with their names.
        abort: Function that `check` calls with the error's text before it raises, to notify the other ranks.
        owner: Class name of the averager.

    Raises:
        ValueError: A parameter accepts no hooks, is already averaged or sharded, or has gradients of another dtype.

    Attributes:
        model, named: The module and the named parameters that were passed.
        names, parameters, ids: Names, tensors and Python `id`s of the parameters, in order.
        hooked: Whether hooks are registered.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> registry = ParameterRegistry(model, list(model.named_parameters()), print)
        >>> _ = model.append(torch.nn.Linear(1, 1))
        >>> registry.check()
        Traceback (most recent call last):
        ...
        RuntimeError: '1.weight' (and 1 more) was added to the model later, ...
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        named: Named,
        abort: Callable[[str], object],
        owner: str = "GradientAverager",
    ) -> None:
        check_unclaimed(named)
        check_parameters(named)
        _check_grad_dtypes(named)
        self.model = model
        self.named = named
        self._abort = abort
        self._owner = owner
        self.names: list[str] = [name for name, _ in named]
        self.parameters: list[torch.Tensor] = [p for _, p in named]
        self.ids: frozenset[int] = frozenset(map(id, self.parameters))
        self._implementations = list(map(_implementation, self.parameters))
        self._dtypes = list(map(_dtype, self.parameters))
        self.hooked: bool = False
        self._handles: list[Any] = []
        self._paused: _Paused = []
        self._members = ModelMembers(model, named)

    # -- checks ---------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise `RuntimeError` if a parameter was replaced, swapped, added or converted, and so is not averaged."""
        problem = self._members.problem()
        if problem is None:
            # Compare the addresses of the C++ tensors, because a swap keeps the Python objects in the model.
            same = list(map(_implementation, self.parameters)) == self._implementations
            if same and list(map(_dtype, self.parameters)) == self._dtypes:
                return
            problem = self._converted()
        text = f"{problem}. Call remove() on the averager, and create a new averager for the changed model"
        self._abort(text)
        raise RuntimeError(text)

    def _converted(self) -> str:
        known = zip(self.names, self.parameters, self._implementations, self._dtypes, strict=True)
        for name, parameter, implementation, dtype in known:
            if _implementation(parameter) != implementation:
                return f"{name!r} was swapped with another tensor, so its gradient is not averaged"
            if parameter.dtype != dtype:
                break
        return f"{name!r} was {dtype} when its averager was created, and is now {parameter.dtype}"

    # -- hooks ----------------------------------------------------------------------------------
    def watch_gradients(self, before: Callable[[int, torch.Tensor], None]) -> None:
        """Call `before` with the parameter's index and the gradient, before the gradient is added to p.grad.

        Frozen parameters are hooked as well, because they may be unfrozen later.
        """
        self.hooked = True
        # Claim the parameters only when they are hooked: an averager whose construction fails must leave them free. The
        # claim ends in `remove`, or when `_claim` is dropped.
        self._claim = claim(self.named, "averaged", self._owner)
        self._handles += [hook_gradient(parameter, partial(before, i)) for i, parameter in enumerate(self.parameters)]

    def watch_forward(self, after: Callable[[Any], object], *, traced: bool) -> None:
        """Call `check` before each forward of the model or a submodule, or during tracing if the forward is compiled.

        Args:
            after: Called with the value that each forward of the model returned.
            traced: Whether to call `after` if the forward is compiled.
        """
        model = self.model
        if model is None:
            return

        self._handles += [
            model.register_forward_pre_hook(_BeforeForward(self.check, self._paused)),
            model.register_forward_hook(_AfterForward(after, self._paused, traced=traced), always_call=True),
        ]
        self._watch_writes(model)
        hook = _ModuleHook(lambda *_: self.check())
        for module in model.modules():
            if module is not model and any(id(p) in self.ids for p in module.parameters()):
                handle = module.register_forward_pre_hook(hook)
                self._handles.append(handle)
                table: Any = handle.hooks_dict_ref()
                self._paused.append((table, handle.id, hook))

    def _watch_writes(self, model: torch.nn.Module) -> None:
        """Warn if a forward writes to parameters; stop watching after the first forward in training mode."""
        versions: list[int] = []

        def start(*_: Any) -> None:
            versions[:] = map(_version, self.parameters)

        def finish(*_: Any) -> None:
            now = zip(self.names, self.parameters, versions, strict=False)
            written = [name for name, p, version in now if p.requires_grad and p._version != version]
            # Stop after the first forward in training mode, because comparing the versions in each forward would slow
            # down every step.
            if written or model.training:
                for handle in handles:
                    handle.remove()
            if written:
                warnings.warn(
                    f"a forward of the model writes parameters ({', '.join(map(repr, written))}): where it depends on "
                    "the rank's data, ranks drift apart. Change parameters on all ranks alike, after optimizer.step()",
                    stacklevel=2,
                )

        handles = [
            model.register_forward_pre_hook(_ModuleHook(start)),
            model.register_forward_hook(_ModuleHook(finish)),
        ]
        self._handles += handles

    def remove(self) -> None:
        """Remove the hooks."""
        if self.hooked:
            release(self.parameters)
        self.hooked = False
        # Clear `_paused` first: otherwise, a forward that is running would put the submodules' hooks back.
        self._paused.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _check_grad_dtypes(named: Named) -> None:
    for name, parameter in named:
        # Older versions of torch have no `grad_dtype`. If `grad_dtype` is None, p.grad may have any dtype, including
        # the parameter's.
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        if dtype != parameter.dtype:
            raise ValueError(
                f"{name!r} is {parameter.dtype}, but its grad_dtype is {dtype}: gradients that are averaged in hooks "
                "have the parameter's dtype. Call un.average_gradients(model, comm) after backward() instead"
            )


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call a hook with each gradient of a parameter, even if it is frozen now and unfrozen later."""
    frozen = not parameter.requires_grad
    if frozen and (parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex())):
        # Frozen inference tensors, and tensors that are neither floating-point nor complex, can never have a gradient
        # to hook.
        return RemovableHandle(OrderedDict())
    # Unfreeze the parameter temporarily, because torch rejects hooks on frozen parameters.
    parameter.requires_grad_(True)
    # After a swap, torch ignores the tensor's hook tables until they are assigned again.
    parameter._backward_hooks = parameter._backward_hooks
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    handle: RemovableHandle = parameter.register_hook(hook)
    parameter.requires_grad_(not frozen)
    return handle


def hook_forward(model: object, hook: Callable[..., None]) -> RemovableHandle:
    """Call a hook before each forward of a model, but not for copies of the model or in a compiled forward.

    Does nothing if the model is scripted or is not a module.
    """
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return RemovableHandle(OrderedDict())
    return model.register_forward_pre_hook(_ModuleHook(hook))


class _ModuleHook:
    """A hook that does nothing on copies of the model, including pickled copies, because copies are not averaged.

    Args:
        call: Function to call, except in a compiled forward; None for no function.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None and not torch.compiler.is_dynamo_compiling():
            self._call(*arguments)

    def __reduce__(self) -> tuple[type[_ModuleHook], tuple[()]]:
        return _ModuleHook, ()


class _BeforeForward(_ModuleHook):
    """Hook that checks the parameters before each forward of the model, or when Dynamo traces the forward.

    Args:
        check: Function that raises if a parameter has changed.
        paused: The submodules' hooks, which are removed during the model's forward, because running them all would take
            longer than this single check.
    """

    def __init__(self, check: Callable[[], None], paused: _Paused) -> None:
        super().__init__()
        self._check = check
        self._paused = paused
        self._constant = _constant(check)

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._constant()
            return
        for table, number, _hook in self._paused:
            table.pop(number, None)
        self._check()


class _AfterForward(_ModuleHook):
    """Hook that calls a function with the value that each forward of the model has returned.

    Args:
        after: Function to call with the returned value.
        paused: The submodules' hooks, which were removed during the forward and are put back.
        traced: Whether to call `after` if the forward is compiled.
    """

    def __init__(self, after: Callable[[Any], object], paused: _Paused, *, traced: bool) -> None:
        super().__init__()
        self._after = after
        self._paused = paused
        self._traced = traced

    def __call__(self, _module: torch.nn.Module, _given: Any, returned: Any) -> None:
        compiled = torch.compiler.is_dynamo_compiling()
        if compiled and not self._traced:
            return
        if not compiled:
            for table, number, hook in self._paused:
                table[number] = hook
        # If the forward pass has raised, `returned` is None, and nothing is called.
        if returned is not None and (not self._traced or compiled or not in_functional_call()):
            self._after(returned)


def _constant(check: Callable[[], None]) -> Callable[[], int]:
    """Return a check that Dynamo calls when it traces a forward, and again when it re-traces after a model change.

    Dynamo treats the result as a constant.
    """

    def constant() -> int:
        check()
        return 0

    # Set the attribute that torch.compiler.assume_constant_result would set: calling that function would import Dynamo,
    # which takes seconds.
    constant.__dict__["_dynamo_marked_constant"] = True
    return constant
