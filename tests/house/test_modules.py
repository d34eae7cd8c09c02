"""Every module has a docstring and `__all__`, and none is too long."""

from __future__ import annotations

import ast
import importlib

from import_graph import SOURCE, modules, trees
from lines import of_native, of_python

# In lines; docstrings do not count.
MAX_FILE = 1000
MAX_FUNCTION = 80


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def defined(tree: ast.Module) -> set[str]:
    """The public names that a module makes itself. Type variables are its own business."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith(("TypeVar(", "ParamSpec(")):
            names.update(leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def length(*nodes: ast.stmt) -> int:
    """Lines from the first statement to the last."""
    return (nodes[-1].end_lineno or 0) - nodes[0].lineno + 1 if nodes else 0


def too_long(name: str, tree: ast.Module) -> list[str]:
    """A file, and those of its functions, that have too many lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            whole = isinstance(node, ast.Module)
            inner = [each for each in ast.walk(node) if isinstance(each, DOCUMENTED) and ast.get_docstring(each)]
            lines = length(*node.body) if whole else length(node)
            lines -= sum(length(each.body[0]) for each in inner)
            if lines > (MAX_FILE if whole else MAX_FUNCTION):
                found.append(f"{name if whole else f'{name}:{node.name}'} has {lines} lines")
    return found


def test_modules_have_docstrings() -> None:
    summaries = {name: (ast.get_docstring(tree) or "").split("\n\n")[0] for name, tree in trees().items()}
    faults = [f"{name} begins with {text!r}" for name, text in summaries.items() if not text.endswith((".", ":"))]
    assert not faults, "no docstring that begins with a sentence:\n" + "\n".join(faults)


def test_modules_have_all() -> None:
    faults = []
    for name, tree in trees().items():
        if name.endswith("__main__.py"):
            continue
        module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        offered: list[str] = getattr(module, "__all__", [])
        if len(offered) > len(set(offered)):
            faults.append(f"{name} offers a name twice")
        if missing := [offer for offer in offered if not hasattr(module, offer)]:
            faults.append(f"{name} offers {missing}, but has no such thing")
        if hidden := defined(tree) - set(offered):
            faults.append(f"{name} defines {sorted(hidden)}: put them into __all__, or begin them with an underscore")
    assert not faults, "\n".join(faults)


def test_files_and_functions_are_short() -> None:
    found = [fault for name, tree in trees().items() for fault in too_long(name, tree)]
    native = {path.name: len(path.read_text().splitlines()) for path in (SOURCE / "native").rglob("*.?pp")}
    found += [f"{name} has {lines} lines" for name, lines in native.items() if lines > MAX_FILE]
    assert not found, f"over {MAX_FILE} lines a file or {MAX_FUNCTION} a function:\n" + "\n".join(found)


# They measure or start processes, and no deadline of theirs reaches a call of held ranks.
READ_PYTHONS_CLOCK = ("core/clock.py", "gradients/", "launcher/", "simulation/", "testing/", "tools/")


def test_deadlines_are_on_the_clock_that_a_debugger_stops() -> None:
    faults = []
    for name, tree in trees().items():
        if name.removeprefix("unisono/").startswith(READ_PYTHONS_CLOCK):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.monotonic":
                faults.append(f"{name}:{node.lineno} reads time.monotonic")
            elif isinstance(node, ast.ImportFrom) and node.module == "unisono.core.clock":
                faults.append(f"{name}:{node.lineno} keeps a function that `clock` replaces; import the module")
    assert not faults, "\n".join(faults)


def test_no_package_hides_its_modules() -> None:
    files = modules()
    for package, path in files.items():
        if path.stem == "__init__":
            for node in ast.walk(trees()[str(path.relative_to(SOURCE))]):
                if isinstance(node, ast.ImportFrom):
                    names = {f"{package}.{alias.asname or alias.name}" for alias in node.names}
                    hidden = {name for name in names if name in files and node.module != package}
                    assert not hidden, f"{package} has functions named as modules: {sorted(hidden)}"


def test_measures_count_correctly() -> None:
    assert defined(trees()["unisono/core/types.py"]) >= {"Send", "COLLECTIVE_TAG", "Message"}
    assert "T" not in defined(trees()["unisono/core/registry.py"])
    document = '    """Two\n    lines."""\n'
    longest = "def f():\n" + document + "    x = 1\n" * (MAX_FUNCTION - 1)
    assert too_long("a.py", ast.parse(longest)) == []
    assert too_long("a.py", ast.parse(f"{longest}    x = 1")) == [f"a.py:f has {MAX_FUNCTION + 1} lines"]
    count = MAX_FILE // MAX_FUNCTION + 1
    assert too_long("a.py", ast.parse(longest * count)) == [f"a.py has {MAX_FUNCTION * count} lines"]
    assert of_python("x = 1\na, b = 1, 2\nif x:\n    ...\nelse:\n    c = d = a, b\n").total() == 5
    assert of_native("#if 1\nint f() { for (a; b; c) { d(); } return {}; } // ;\n#endif\nint x[] = {1};").total() == 7
