"""Keeps this package's code out of `torch.compile` graphs, so that it runs uncompiled, between two graphs."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

__all__ = ["compiling", "leave_out_of_graphs"]

_MODULE = "torch._dynamo.convert_frame"

_FOLDER = __file__.removesuffix("core/compiled_code.py")

_TRACED = (
    "autograd/",
    "collectives/arguments.py",
    "comm/place.py",
    "core/tensors.py",
    "gradients/parameter_registry.py",
)
"""Files whose functions Dynamo traces into the calling graph."""

_REFUSES = f"{_FOLDER}sharding/runtime.py"
"""A file that checks whether its caller is compiled."""

compiling: Callable[[], AbstractContextManager[None]] = nullcontext
"""Context in which Dynamo compiles a frame, under a lock of torch's. A simulation replaces it."""


def leave_out_of_graphs() -> None:
    """Make Dynamo break the graph at each call into this package, now or once Dynamo is imported.

    The package (except for the files of `_TRACED`) then runs uncompiled, as does the code that it calls, such as the
    `step` of an optimizer that updates shards. By default, Dynamo traces every Python frame below a compiled one into a
    graph. There, messages, locks, backward hooks and inference mode would have no effect, would run only once, or could
    not be traced. `torch.compiler.disable` on each public function would import Dynamo, which takes a second, and would
    add 0.6 us to each call; a rule for whole files avoids both costs.
    """
    if _MODULE in sys.modules:
        _add_rules(import_module(_MODULE))
    else:
        sys.meta_path.insert(0, _AtImport)


class _AtImport(SourceFileLoader):
    """Import hook that adds the rules once Dynamo's module is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec for Dynamo's module, or None for any other module."""
        file = f"{path[0]}/{name.rpartition('.')[2]}.py" if name == _MODULE else ""
        return spec_from_file_location(name, file, loader=cls(name, file)) if file else None

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and add the rules."""
        super().exec_module(module)
        _add_rules(module)


def _add_rules(dynamo: ModuleType) -> None:
    # If a torch version lacks one of the private names used here, Dynamo traces this package like any other package.
    try:
        convert = dynamo.CatchErrorsWrapper.__call__
        plain = dynamo.FrameExecStrategy(dynamo.FrameAction.SKIP, dynamo.FrameAction.SKIP)
        skipped = dynamo.ConvertFrameReturn(frame_exec_strategy=plain)
        inlined = dynamo.trace_rules.get_mod_inlinelist
        dynamo.trace_rules.add("unisono")
    except AttributeError:
        return

    # Dynamo traces functions in the files of `_TRACED` when a graph calls them; for frames outside a graph, Dynamo
    # treats all files of this package alike. Replace the function that returns the list of traced files, because the
    # list is rebuilt when the function's cache is cleared, for example by `init_process_group`.
    dynamo.trace_rules.get_mod_inlinelist = functools.cache(lambda: inlined() | {_FOLDER + name for name in _TRACED})

    handles = logging.Handler.handle.__code__

    def call(self: Any, frame: Any, *given: Any) -> Any:
        # A logging handler runs under its own lock, and Dynamo compiles under another lock. If Dynamo compiled a
        # handler in one thread, it could deadlock with another thread that logs while it compiles.
        if sys._getframe(1).f_code is handles:
            return skipped
        with compiling():
            returned = convert(self, frame, *given)
        file = frame.f_code.co_filename
        if file.startswith(_FOLDER) and file != _REFUSES:
            # Dynamo stores the strategy with the frame's code object, and does not determine it again. With only the
            # rule that `trace_rules.add` added, Dynamo would still compile the functions that this frame calls.
            returned.frame_exec_strategy = plain
        return returned

    dynamo.CatchErrorsWrapper.__call__ = call
