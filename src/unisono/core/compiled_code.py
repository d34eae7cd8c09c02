"""Code of this package inside a function that `torch.compile` compiles: it runs as it stands, between two graphs."""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

__all__ = ["leave_out_of_graphs"]

_MODULE = "torch._dynamo.convert_frame"

_FOLDER = __file__.removesuffix("core/compiled_code.py")

_TRACED = (
    "autograd/",
    "collectives/arguments.py",
    "comm/place.py",
    "core/tensors.py",
    "gradients/parameter_registry.py",
)
"""Files whose functions Dynamo takes into the graph that calls them."""

_REFUSES = f"{_FOLDER}sharding/runtime.py"
"""A file that looks whether its caller is compiled."""


def leave_out_of_graphs() -> None:
    """Tell Dynamo to end a graph at each call of this package, now or when Dynamo is first imported.

    Nor is anything compiled that the call runs, such as the step of an optimizer whose parameters are parts that move.
    Dynamo would otherwise trace every Python frame below a compiled one, and so put messages, locks, hooks of a
    backward pass and inference mode into a graph, where they are lost, happen once, or cannot be traced.
    `torch.compiler.disable` of each public function would import Dynamo, which takes a second, and would cost each call
    0.6 us; a rule about the files costs neither.
    """
    if _MODULE in sys.modules:
        _add_rules(import_module(_MODULE))
    else:
        sys.meta_path.insert(0, _AtImport)


class _AtImport(SourceFileLoader):
    """Finder and loader of Dynamo's module, which adds the rules when it is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of that module; None for all others."""
        file = f"{path[0]}/{name.rpartition('.')[2]}.py" if name == _MODULE else ""
        return spec_from_file_location(name, file, loader=cls(name, file)) if file else None

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and add the rules."""
        super().exec_module(module)
        _add_rules(module)


def _add_rules(dynamo: ModuleType) -> None:
    # All of these names are private: a torch without them traces this package as it does any other.
    try:
        convert = dynamo.CatchErrorsWrapper.__call__
        plain = dynamo.FrameExecStrategy(dynamo.FrameAction.SKIP, dynamo.FrameAction.SKIP)
        inlined = dynamo.trace_rules.get_mod_inlinelist
        dynamo.trace_rules.add("unisono")
    except AttributeError:
        return

    # These are traced where they are called in a graph. Where they are called outside, all files are alike. The list is
    # made anew when its cache is cleared, as by `init_process_group`.
    dynamo.trace_rules.get_mod_inlinelist = functools.cache(lambda: inlined() | {_FOLDER + name for name in _TRACED})

    def call(self: Any, frame: Any, *given: Any) -> Any:
        returned = convert(self, frame, *given)
        file = frame.f_code.co_filename
        if file.startswith(_FOLDER) and file != _REFUSES:
            # Dynamo keeps it with the code, and asks once. By the rule alone it would compile what this frame calls.
            returned.frame_exec_strategy = plain
        return returned

    dynamo.CatchErrorsWrapper.__call__ = call
