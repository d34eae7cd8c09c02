"""The notebooks in docs/notebooks run from top to bottom, and a mistake in a cell is shown in a few lines."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
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


def execute(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all cells, in a kernel that has no user's settings and is reached by no network."""
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(folder))
    kernel = AsyncKernelManager(kernel_name="python3", transport="tcp")
    NotebookClient(notebook, km=kernel, timeout=100, resources={"metadata": {"path": str(folder)}}).execute()


def errors(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "clear all outputs before you commit"
    # An error in any other cell raises here.
    execute(notebook, tmp_path, monkeypatch)
    for cell in cells:
        wrong_on_purpose = "raises-exception" in cell.metadata.get("tags", ())
        assert [len(output.traceback) <= 12 for output in errors(cell)] == [True] * wrong_on_purpose


@pytest.mark.soak
def test_a_mistake_is_shown_in_a_few_lines_with_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [new_code_cell(SETUP), *(new_code_cell(source) for source, _, _ in MISTAKES)]
    for cell in cells[1:]:
        cell.metadata["tags"] = ["raises-exception"]
    execute(new_notebook(cells=cells), tmp_path, monkeypatch)
    for number, (cell, (_, kind, line)) in enumerate(zip(cells[1:], MISTAKES, strict=True), 2):
        (error,) = errors(cell)
        text = "\n".join(error.traceback)
        assert error.ename == kind
        assert len(text.splitlines()) <= 12, text
        assert line in text
        assert f"Cell In[{number}], line" in text
        assert "ipykernel" not in text
        assert "src/unisono" not in text
