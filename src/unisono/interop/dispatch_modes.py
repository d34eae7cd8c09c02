"""Routes calls through torch's dispatcher when dispatch modes, FakeTensor or wrapper subclasses must see them.

C++ backends are called through operators (`c10d::allreduce_`), which modes and tensor subclasses intercept. A Python
group is called directly, which is faster but invisible to them. A call that must be seen is made on a C++ group without
a backend instead, and the lowest mode makes it on ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["PLAIN", "PYTHON", "dispatched", "excluded", "first_tensor", "modes"]

modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
excluded: Callable[[torch._C.DispatchKey], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
PLAIN: Any = torch.Tensor.__torch_dispatch__
"""`__torch_dispatch__` of a tensor class that does not handle operators itself."""
PYTHON = torch._C.DispatchKey.Python


def first_tensor(arguments: Sequence[object]) -> torch.Tensor | None:
    """Return the first tensor among arguments, including those in lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, list) and (found := first_tensor(argument)) is not None:
            return found
    return None


def dispatched(operator: Callable[[], Any], call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a torch operator, such as `c10d::allreduce_`, so that modes and tensor subclasses handle it.

    Args:
        operator: Method of a C++ group without a backend, with its arguments.
        call: Function that carries it out, with the tensors that modes and subclasses pass on.
        args: Arguments of `call`, tensors first.
    """
    with _beneath(_Kernel(call, args)):
        return operator()


class _Kernel(TorchDispatchMode):
    """The lowest mode, in place of the kernels that the operator lacks; a call that bypasses it raises."""

    def __init__(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call
        self._args = args
        # C++ returns the same work object only while Python holds a reference.
        self._work: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = first_tensor(args)
        # Modes below are torch's own, such as FakeTensorMode: their tensors have no elements, and neither have meta
        # tensors.
        if func.namespace != "c10d" or modes() or (first is not None and first.is_meta):
            return func(*args, **(kwargs or {}))
        if types:
            # The subclass calls the operator again with its inner tensors.
            return NotImplemented
        # Every operator takes its tensors first, like our methods, and then the group. Only the barrier's takes a
        # tensor that our method does not.
        count = next(place for place, part in enumerate(args) if isinstance(part, torch.ScriptObject))
        given = args[:count] if first_tensor(self._args) is not None else ()
        self._work = self._call(*given, *self._args[len(given) :])
        boxed = self._work.boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


@contextmanager
def _beneath(kernel: TorchDispatchMode) -> Iterator[None]:
    """Enter a mode below the user's modes without re-entering those, because one that counts would restart."""
    users = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
    for _ in users:
        _pop_mode()
    try:
        with kernel:
            for mode in users:
                _push_mode(mode)
            try:
                yield
            finally:
                for _ in users:
                    _pop_mode()
    finally:
        for mode in users:
            _push_mode(mode)
