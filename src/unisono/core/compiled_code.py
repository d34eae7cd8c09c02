"""Code of this package inside a function that `torch.compile` compiles: it runs as it stands, between two graphs."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["leave_out_of_graphs"]

_RULES = "torch._dynamo.trace_rules"

_PACKAGE = Path(__file__).parents[1]

_TRACED = (
    "autograd/",
    "collectives/arguments.py",
    "comm/place.py",
    "core/tensors.py",
    "gradients/parameter_registry.py",
)
"""Files whose functions Dynamo takes into the graph that calls them."""


def leave_out_of_graphs() -> None:
    """Tell Dynamo to end a graph at each call of this package, now or when Dynamo is first imported.

    Dynamo would otherwise trace every Python frame below a compiled one, and so put messages, locks, hooks of a
    backward pass and inference mode into a graph, where they are lost, happen once, or cannot be traced.
    `torch.compiler.disable` of each public function would import Dynamo, which takes a second, and would cost each call
    0.6 us; a rule about the files costs neither.
    """
    if _RULES in sys.modules:
        _add_rules(import_module(_RULES))
    else:
        sys.meta_path.insert(0, _AtImport())


class _AtImport:
    """Finder that adds the rules to Dynamo's when that module is imported, and finds nothing else."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of the module of rules; None for all others."""
        if name != _RULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_add(module: ModuleType) -> None:
                execute(module)
                _add_rules(module)

            spec.loader.exec_module = then_add  # type: ignore[method-assign]
        return spec


def _add_rules(rules: ModuleType) -> None:
    # Both names are private: a torch without them traces this package as it does any other.
    if hasattr(rules, "add") and hasattr(rules, "get_mod_inlinelist"):
        rules.add("unisono")
        # These are traced where they are called in a graph. Where they are called outside, the rule above holds.
        rules.get_mod_inlinelist().update(f"{_PACKAGE}/{name}" for name in _TRACED)
