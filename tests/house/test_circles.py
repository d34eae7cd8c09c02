"""No modules import each other in a circle: not inside functions, and not for annotations only."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from import_graph import PACKAGE, Graph, import_graph


def circle(graph: Graph) -> list[str]:
    """Return modules that import each other in a circle, the first one repeated at the end; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_modules_have_no_circle() -> None:
    found = circle(import_graph())
    assert not found, " -> ".join(found)


@pytest.mark.parametrize(
    "back",
    [
        "import unisono.a.x",
        "from unisono.a import x",
        "def f():\n    from unisono.a.x import f",
        "if TYPE_CHECKING:\n    import unisono.a.x",
    ],
)
def test_a_circle_is_found(tmp_path: Path, back: str) -> None:
    folder = tmp_path / PACKAGE / "a"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from unisono.a.x import f")
    (folder / "x.py").write_text("from unisono.a import y")
    (folder / "y.py").write_text("import torch")
    assert not circle(import_graph(tmp_path))
    (folder / "y.py").write_text(back)
    assert set(circle(import_graph(tmp_path))) == {"unisono.a.x", "unisono.a.y"}


def test_a_name_of_a_package_counts_as_the_package(tmp_path: Path) -> None:
    folder = tmp_path / PACKAGE / "a"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from unisono.a.x import f")
    (folder / "x.py").write_text("from unisono.a import f")
    assert set(circle(import_graph(tmp_path))) == {"unisono.a", "unisono.a.x"}
