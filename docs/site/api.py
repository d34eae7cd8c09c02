"""Pages of the API reference, one a public module, made of what `__all__` leads to."""

from __future__ import annotations

import inspect
import types
from typing import Any

import unisono

__all__ = ["pages"]

OWN_PAGE = ("Communicator",)
"""Classes of `unisono` with a page of their own."""


def modules(module: types.ModuleType, path: str = "un") -> dict[str, types.ModuleType]:
    """Return the public modules below one, by their names in code that imports `unisono as un`."""
    found = {path: module}
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            found |= modules(value, f"{path}.{name}")
    return found


def pages() -> dict[str, str]:
    """Return the text of each page by its file's name. A name that several modules have is described in one."""
    texts, seen = {}, {}
    # A name belongs to the module below: `un.average_gradients` is that of `un.gradients`.
    for path, module in sorted(modules(unisono).items(), key=lambda item: -item[0].count(".")):
        parts = [f"# {path}\n", f"::: {module.__name__}\n    options: {{members: false, show_root_heading: false}}\n"]
        for name in module.__all__:
            value = getattr(module, name)
            parts.append(entry(value, module, f"{path}.{name}", seen, texts))
        texts[f"{path.removeprefix('un.')}.md"] = "\n".join(parts)
    return texts


def entry(value: Any, module: types.ModuleType, path: str, seen: dict[Any, str], texts: dict[str, str]) -> str:
    """Return a name's part of its module's page."""
    name = path.rpartition(".")[2]
    if isinstance(value, types.ModuleType):
        return f"## {path} {{ #{path} }}\n\nA module: [{path}]({path.removeprefix('un.')}.md).\n"
    where = f"{module.__name__}.{name}"
    if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("unisono"):
        where = f"{value.__module__}.{value.__qualname__}"
    if where in seen:
        return f"## {path} {{ #{path} }}\n\nThe same as [{seen[where]}][{where}].\n"
    seen[where] = path
    if "<locals>" in where:
        return f"## {path} {{ #{path} }}\n\n{inspect.getdoc(value)}\n"
    text = f"::: {where}\n    options: {{heading: {path}, toc_label: {name}}}\n"
    if name in OWN_PAGE:
        texts[f"{name}.md"] = text.replace("{", "{heading_level: 1, ")
        return f"## {path} {{ #{path} }}\n\nOn [its own page]({name}.md).\n"
    return text
