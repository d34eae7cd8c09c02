"""Docstrings of all public names: Args for each parameter, Returns, Raises, and an example that runs.

Public is what `__all__` of `unisono` and of its public modules leads to, with the public methods of classes.
`python tests/house/test_public_docstrings.py [ROOM]` prints what is missing.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import unisono

_TRANSPORT = "called by communicators, not by users; CONTRIBUTING.md builds a wrapper that runs"

NO_EXAMPLE: dict[str, str] = {
    "un.Communicator.from_mpi": "needs mpirun; docs/how-to/mpi.md has a program",
    "un.errors.UnavailableError": "depends on what the machine lacks",
    "un.gradients.SyncBatchNorm.forward": "called by the layer's `__call__`, which the example of the class shows",
    "un.rpc.Agent.on_process_exit": "called by the library when the process ends",
    "un.Pool.on_process_exit": "called by the library when the process ends",
    "un.testing.Checksummed.abort": _TRANSPORT,
    "un.testing.Checksummed.compare": _TRANSPORT,
    "un.testing.Checksummed.connect": _TRANSPORT,
    "un.testing.Checksummed.declared": _TRANSPORT,
    "un.testing.Checksummed.empty": _TRANSPORT,
    "un.testing.Checksummed.leave": _TRANSPORT,
    "un.testing.Checksummed.plain": _TRANSPORT,
    "un.testing.Checksummed.post": _TRANSPORT,
    "un.testing.Checksummed.reconfigure": _TRANSPORT,
    "un.testing.Checksummed.settle": _TRANSPORT,
    "un.testing.Checksummed.shm_peers": _TRANSPORT,
    "un.testing.Checksummed.simulate_crash": _TRANSPORT,
    "un.testing.Checksummed.starts": _TRANSPORT,
    "un.testing.Checksummed.supports": _TRANSPORT,
    "un.testing.Checksummed.wrap_child": _TRANSPORT,
    "un.testing.Delayed.abort": _TRANSPORT,
    "un.testing.Delayed.post": _TRANSPORT,
    "un.testing.Delayed.wrap_child": _TRANSPORT,
    "un.testing.Faulty.abort": _TRANSPORT,
    "un.testing.Faulty.post": _TRANSPORT,
    "un.testing.Faulty.wrap_child": _TRANSPORT,
}
"""Public names without an example, each with the reason."""


def modules(module: types.ModuleType, path: str, seen: set[str]) -> Iterator[tuple[types.ModuleType, str]]:
    if module.__name__ in seen or not module.__name__.startswith("unisono"):
        return
    seen.add(module.__name__)
    yield module, path
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from modules(value, f"{path}.{name}", seen)


def functions(owner: type, path: str) -> Iterator[tuple[str, Any, bool]]:
    """Public methods and properties, with whether each is a property."""
    for name in dir(owner):
        value = inspect.getattr_static(owner, name)
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_property = isinstance(function, property)
        function = function.fget if isinstance(function, property) else function
        if (
            not name.startswith(("_", "test_"))
            and inspect.isfunction(function)
            and function.__module__.startswith("unisono")
        ):
            yield f"{path}.{name}", function, is_property


def public() -> dict[str, tuple[Any, bool]]:
    """Each public class, function, method and property by its first path, with whether it is a property."""
    found: dict[str, tuple[Any, bool]] = {}
    seen: set[Any] = set()
    for module, path in modules(unisono, "un", set()):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)) or not value.__module__.startswith("unisono"):
                continue
            own = [(f"{path}.{name}", value, False)]
            own += functions(value, f"{path}.{name}") if inspect.isclass(value) else []
            for where, each, is_property in own:
                if each not in seen:
                    seen.add(each)
                    found[where] = each, is_property
    return found


PUBLIC = public()


def room(value: Any) -> str:
    return str(value.__module__).split(".")[1]


def sections(docstring: str) -> dict[str, str]:
    """Text of each section of a docstring, by its title: "Args", "Returns", "Example"."""
    parts = re.split(r"^(\w+):\s*$|^(Balance|Cost|Method|Returns|Yields|Raises): ", docstring, flags=re.MULTILINE)
    return {parts[n] or parts[n + 1]: parts[n + 2] for n in range(1, len(parts), 3)}


def described(arguments: str) -> set[str]:
    """Names in a section Args: `a, b: text`, each entry at the section's own indentation."""
    lines = textwrap.dedent(arguments.strip("\n")).splitlines()
    heads = [line.partition(":")[0] for line in lines if line and not line[0].isspace() and ":" in line]
    return {name.strip("*` ") for head in heads for name in head.split(",")}


def docstring(value: Any) -> str:
    """Docstring of a class, function or method, inherited ones included.

    `inspect.getdoc` alone finds an inherited docstring of a class method only when it is bound.
    """
    owner = getattr(sys.modules[value.__module__], value.__qualname__.rpartition(".")[0], None)
    return inspect.getdoc(value if owner is None else getattr(owner, value.__name__)) or ""


def parameters(value: Any) -> set[str]:
    if getattr(value, "_is_protocol", False):
        return set()
    # A class that inherits its constructor inherits what describes it.
    if inspect.isclass(value) and "__init__" not in vars(value):
        return set()
    try:
        return set(inspect.signature(value).parameters) - {"self", "cls"}
    except ValueError:
        return set()


def raises(function: Any) -> bool:
    """Return whether the function's own body raises a new error."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return False
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in raised]
    return any(name not in ("NotImplementedError", "AttributeError", "StopIteration") for name in names)


def examples() -> str:
    """Lines of the examples in all docstrings of the modules and classes that define public names."""
    owners = {sys.modules[value.__module__] for value, _ in PUBLIC.values()} | {value for value, _ in PUBLIC.values()}
    docstrings = [inspect.getdoc(owner) or "" for owner in owners]
    return "\n".join(
        line for text in docstrings for line in text.splitlines() if line.lstrip().startswith((">>>", "..."))
    )


EXAMPLES = examples()


def lacks(path: str) -> list[str]:
    """Return the parts that are missing in the docstring of a public name."""
    value, is_property = PUBLIC[path]
    text = docstring(value)
    found, missing = sections(text), []
    if not text:
        return ["docstring"]
    # A dataclass describes its parameters once, as attributes.
    arguments = found.get("Args", "") or (found.get("Attributes", "") if dataclasses.is_dataclass(value) else "")
    if undescribed := parameters(value) - described(arguments):
        missing.append(f"Args: {', '.join(sorted(undescribed))}")
    returned = getattr(value, "__annotations__", {}).get("return")
    says = text.startswith(("Return ", "Yield ", "True if")) or {"Returns", "Yields"} & set(found)
    if (
        inspect.isfunction(value)
        and not is_property
        and returned not in (None, "None", "NoReturn", "Never")
        and not says
    ):
        missing.append("Returns")
    if inspect.isfunction(value) and raises(value) and "Raises" not in found:
        missing.append("Raises")
    shown = ">>>" in text or re.search(rf"\b{value.__name__}\b", EXAMPLES)
    if not is_property and not shown and path not in NO_EXAMPLE:
        missing.append("Example")
    return missing


def test_docstrings_are_complete() -> None:
    faults = [f"{path}: {'; '.join(missing)}" for path in PUBLIC if (missing := lacks(path))]
    assert not faults, "docstrings lack:\n" + "\n".join(faults)


def test_exceptions_are_needed() -> None:
    assert [path for path in NO_EXAMPLE if path not in PUBLIC or ">>>" in (inspect.getdoc(PUBLIC[path][0]) or "")] == []


if __name__ == "__main__":
    wanted = sys.argv[1:]
    faults = {path: lacks(path) for path in PUBLIC if not wanted or room(PUBLIC[path][0]) in wanted}
    faults = {path: missing for path, missing in faults.items() if missing}
    for path, missing in faults.items():
        value = PUBLIC[path][0]
        print(f"{value.__module__}: {path}: {'; '.join(missing)}")
    print(len(faults), "of", len(PUBLIC))
