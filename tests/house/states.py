"""Figures of what a reader must keep in mind: fields that change, parameters, reasons, and modules loaded with a name.

    python tests/house/states.py [--top N] [file or folder ...]

For each class: the attributes of `self` that a method other than `__init__` assigns (plainly, augmented, annotated, as
the target of a loop or a `with`, or by `del`), how many such assignments there are, and the constructor's parameters.
With files or folders, the figures are theirs; without, those of src/, with what a fresh process loads.

- changed: classes with more than 8 attributes assigned outside `__init__`.
- parameters: constructors with more than 10 parameters, `self` not counted.
- words: words of comments for 100 statements. Lines of a licence, `type:`, `noqa` and the like are no comments.
- loaded: modules of the package, and their statements, in `sys.modules` after a program.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lines import NATIVE, of_native, of_python

SOURCES = Path(__file__).parents[2] / "src"
PROGRAMS = {
    "un.launch, GradientAverager, PartitionSampler, checkpoint.save": (
        "import unisono as un; un.launch; un.GradientAverager; un.data.PartitionSampler; un.checkpoint.save"
    ),
    "Communicator": "from unisono.communicator import Communicator",
    "un.launch, GradientAverager": "import unisono as un; un.launch; un.GradientAverager",
}
_DIRECTIVE = re.compile(
    r"^(type: ignore\S*|noqa\b\S*|pragma: .*|mypy: .*|ruff: .*|fmt: .*|!.*|NOLINT\S*)$", re.IGNORECASE
)
_LICENCE = re.compile(r"copyright|licen[cs]e|SPDX", re.IGNORECASE)
_NATIVE_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|//([^\n]*)|/\*(.*?)\*/", re.DOTALL)


class States(NamedTuple):
    """One class.

    Attributes:
        where: Its file and name.
        changed: Attributes assigned outside `__init__`.
        assignments: How often.
        parameters: Of the constructor.
    """

    where: str
    changed: frozenset[str]
    assignments: int
    parameters: int


def python_files(places: list[Path]) -> list[Path]:
    files = (file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))
    return sorted(file for file in files if file.suffix == ".py")


def assigned(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Attributes of the first parameter that a method assigns."""
    parameters = [*method.args.posonlyargs, *method.args.args]
    if not parameters:
        return
    for node in ast.walk(method):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if stored and isinstance(node.value, ast.Name) and node.value.id == parameters[0].arg:
            yield node.attr


def classes(file: Path) -> Iterator[States]:
    where = file.relative_to(SOURCES / "unisono") if file.is_relative_to(SOURCES / "unisono") else file
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        later = [name for method in methods if method.name != "__init__" for name in assigned(method)]
        made = next((method.args for method in methods if method.name == "__init__"), None)
        count = 0 if made is None else len([*made.posonlyargs, *made.args, *made.kwonlyargs]) - 1
        yield States(f"{where}: {node.name}", frozenset(later), len(later), count)


def words_of(comment: str) -> int:
    """Words of a comment, without what programs read in it."""
    if _LICENCE.search(comment):
        return 0
    parts = [part.strip() for part in comment.split("#")]
    return sum(len(part.split()) for part in parts if not _DIRECTIVE.match(part))


def comment_words(file: Path) -> int:
    text = file.read_text()
    if file.suffix in NATIVE:
        return sum(words_of(m[1] or m[2]) for m in _NATIVE_COMMENT.finditer(text) if m[1] or m[2])
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(words_of(token.string) for token in tokens if token.type == tokenize.COMMENT)


def reasons(places: list[Path]) -> tuple[int, int]:
    """Comment words, and statements."""
    words = statements = 0
    for place in places:
        for file in [place] if place.is_file() else place.rglob("*"):
            if file.suffix == ".py" or file.suffix in NATIVE:
                words += comment_words(file)
                statements += (of_native if file.suffix in NATIVE else of_python)(file.read_text()).total()
    return words, statements


def loaded(program: str) -> tuple[int, int]:
    """Modules of the package that a fresh process has after a program, and their statements."""
    show = "import sys; print(*(m.__file__ for n, m in list(sys.modules.items()) if n.split('.')[0] == 'unisono'))"
    ended = subprocess.run([sys.executable, "-c", f"{program}\n{show}"], capture_output=True, text=True, check=True)
    files = [file for file in ended.stdout.split() if file.endswith(".py")]
    return len(files), sum(of_python(Path(file).read_text()).total() for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=Path)
    parser.add_argument("--top", type=int, default=12, help="classes and files shown")
    given = parser.parse_args()
    places = [place.resolve() for place in given.places] or [SOURCES]
    found = [states for file in python_files(places) for states in classes(file)]
    print(f"changed    {sum(len(each.changed) > 8 for each in found)} classes with more than 8 attributes")
    for each in sorted(found, key=lambda each: -len(each.changed))[: given.top]:
        print(f"    {len(each.changed):3} ({each.assignments} assignments)  {each.where}")
    print(f"parameters {sum(each.parameters > 10 for each in found)} constructors with more than 10")
    for each in sorted(found, key=lambda each: -each.parameters)[: given.top]:
        print(f"    {each.parameters:3}  {each.where}")
    words, statements = reasons(places)
    print(f"words      {100 * words / max(1, statements):.0f} for 100 statements ({words} / {statements})")
    if len(places) > 1:
        for place in places:
            words, statements = reasons([place])
            print(f"    {100 * words / max(1, statements):3.0f}  {place.name} ({words} / {statements})")
    if not given.places:
        for name, program in PROGRAMS.items():
            modules, statements = loaded(program)
            print(f"loaded     {statements} statements, {modules} modules: {name}")


if __name__ == "__main__":
    main()
