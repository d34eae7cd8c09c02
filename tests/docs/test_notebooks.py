"""The notebooks in docs/notebooks run from top to bottom, and a mistake in a cell is shown in a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
SLOW = {"replay-a-failure", "train-from-a-notebook"}
NOTEBOOKS = [
    pytest.param(path, marks=pytest.mark.soak if path.stem in SLOW else (), id=path.stem)
    for path in sorted(FOLDER.glob("*.ipynb"))
]

SETUP = """
import torch
import unisono as un
"""
MISMATCH = """
def program(comm):
    comm.all_reduce(torch.zeros(3 + comm.rank))

un.launch(program, 2, "shm", timeout=30)
"""
OWN_ERROR = """
def program(comm):
    if comm.rank == 1:
        {}["lr"]
    comm.barrier()

un.launch(program, 2, "shm", timeout=30)
"""
DEADLOCK = """
def program(comm):
    comm.recv(torch.zeros(1), 1 - comm.rank)

un.simulate(program, 2)
"""
BAD_ARGUMENT = """
un.launch(print, nprocs=0)
"""
MISTAKES = [
    (MISMATCH, "MismatchError", "comm.all_reduce(torch.zeros(3 + comm.rank))"),
    (OWN_ERROR, "KeyError", '{}["lr"]'),
    (DEADLOCK, "DeadlockError", "comm.recv(torch.zeros(1), 1 - comm.rank)"),
    (BAD_ARGUMENT, "ValueError", "un.launch(print, nprocs=0)"),
]


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run all cells, by nbclient's command, in a kernel that has no user's settings."""
    file = folder / "notebook.ipynb"
    nbformat.write(notebook, file)
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", "--timeout=100", str(file)]
    settings = {**os.environ, "IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=settings, cwd=folder)
    # A cell that raises, and is not marked as wrong on purpose, ends the command.
    assert ended.returncode == 0, ended.stderr
    return nbformat.read(file, as_version=4)


def errors(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = [cell.source for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert not stored, "clear all outputs before you commit"
    for cell in execute(notebook, tmp_path).cells:
        if cell.cell_type == "code":
            wrong_on_purpose = "raises-exception" in cell.metadata.get("tags", ())
            assert [len(error.traceback) <= 12 for error in errors(cell)] == [True] * wrong_on_purpose


@pytest.mark.soak
def test_a_mistake_is_shown_in_a_few_lines_with_the_users_own(tmp_path: Path) -> None:
    cells = [new_code_cell(SETUP), *(new_code_cell(source) for source, _, _ in MISTAKES)]
    for cell in cells[1:]:
        cell.metadata["tags"] = ["raises-exception"]
    shown = execute(new_notebook(cells=cells), tmp_path).cells[1:]
    for number, (cell, (_, kind, line)) in enumerate(zip(shown, MISTAKES, strict=True), 2):
        (error,) = errors(cell)
        text = "\n".join(error.traceback)
        print(text)
        assert error.ename == kind
        assert len(text.splitlines()) <= 12
        assert line in text
        assert f"Cell In[{number}], line" in text
        assert "ipykernel" not in text
        assert "IPython" not in text
        assert "src/unisono" not in text
