"""Names in the table of words.toml are gone: files, classes, functions, attributes, parameters; C++ identifiers."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text())
MOST = 40


def definitions(path: Path, module: str) -> set[str]:  # noqa: C901
    """Return what a file defines, as `module.Class.name` or `module.function(parameter)`."""
    found: set[str] = set()

    def assigned(node: ast.AST) -> list[ast.expr]:
        if isinstance(node, ast.Assign):
            return [leaf for t in node.targets for leaf in ast.walk(t) if isinstance(leaf, ast.Name | ast.Attribute)]
        return [node.target] if isinstance(node, ast.AnnAssign) else []

    def function(node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> None:
        found.add(f"{prefix}.{node.name}")
        for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            found.add(f"{prefix}.{node.name}({a.arg})")

    def body(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function(node, prefix)
            elif isinstance(node, ast.ClassDef):
                found.add(f"{prefix}.{node.name}")
                body(node.body, f"{prefix}.{node.name}")
                for target in (target for inner in ast.walk(node) for target in assigned(inner)):
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        found.add(f"{prefix}.{node.name}.{target.attr}")
            found.update(f"{prefix}.{target.id}" for target in assigned(node) if isinstance(target, ast.Name))

    body(ast.parse(path.read_text()).body, module)
    return found


def left() -> list[str]:
    """Old names that are still defined."""
    source = ROOT / "src/unisono"
    defined: set[str] = set()
    for path in source.rglob("*.py"):
        module = str(path.relative_to(source)).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        defined |= definitions(path, module)
    files = [
        name
        for name in WORDS["files"]
        if (ROOT / name).is_file() or (name.endswith("/") and any((ROOT / name).glob("*.py")))
    ]
    return sorted([*files, *(name for name in WORDS["names"] if name in defined)])


def test_old_names_are_gone() -> None:
    remaining = left()
    for name in remaining:
        print(name, "->", WORDS["names"].get(name) or WORDS["files"].get(name), WORDS["kept"].get(name, "(no reason)"))
    assert len(remaining) <= MOST
    assert set(remaining) <= set(WORDS["kept"])


def test_old_native_names_are_gone() -> None:
    found: set[str] = set()
    for path in (ROOT / "src/native").rglob("*.[ch]pp"):
        code = re.sub(r"//.*", "", path.read_text())
        found |= {name for name in re.findall(r"[A-Za-z_]\w*", code) if name in WORDS["native"]}
    assert not found, {name: WORDS["native"][name] for name in found}


def test_definitions_are_found() -> None:
    found = definitions(ROOT / "src/unisono/comm/lifecycle.py", "comm.lifecycle")
    assert {"comm.lifecycle.LifecycleMixin", "comm.lifecycle.LifecycleMixin.close"} <= found
    assert any(re.fullmatch(r"comm\.lifecycle\.LifecycleMixin\.before_close\(\w+\)", name) for name in found)
