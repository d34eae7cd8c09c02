"""Common mistakes are shown in a few lines, once, with the user's own line, however the ranks are started.

A block is what is printed of an error. Of torchrun it is what the ranks print, and the text of each rank in its report;
the form around that (its own traceback, rules, and fields such as the host) is torchrun's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_helpers import new_pool
from mistakes import MISTAKES, Mistake

MOST_LINES = 12
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
BANNER = re.compile(
    r"\*+$|Setting OMP_NUM_THREADS|[WE]\d{4} |=+$|-+$|train.py FAILED|Failures:|Root Cause|\[\d\]:"
    r"|  <NO_OTHER_FAILURES>|  (time|host|rank|exitcode|error_file) *:"
)
OPTIONS = ["-p", "no:cacheprovider", "--color=no"]
NAMES = [mistake.name for mistake in MISTAKES]
NAMED = {mistake.name: mistake for mistake in MISTAKES}


def run(folder: Path, *command: str) -> str:
    """Return what a program prints."""
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=folder)
    return ended.stdout + ended.stderr


def under_unisono_run(folder: Path, mistake: Mistake) -> str:
    (folder / "train.py").write_text(mistake.script())
    return run(folder, sys.executable, "-m", "unisono", "run", "-n", "2", "train.py")


def under_torchrun(folder: Path, mistake: Mistake) -> str:
    (folder / "train.py").write_text(mistake.script())
    said = run(folder, *TORCHRUN)
    said = re.sub(r"^Traceback(.|\n)*ChildFailedError: *$", "", said, count=1, flags=re.MULTILINE)
    return "\n".join(line for line in said.splitlines() if not BANNER.match(line))


def run_pytest(folder: Path, environment: dict[str, str]) -> None:
    """Run pytest on a folder, and write what it prints to a file; the process is of no more use then."""
    for number in (1, 2):
        os.dup2(os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    pytest.main(OPTIONS)


def run_forked_pytest(folder: Path) -> str:
    """Return what pytest prints in a process that has torch already."""
    with new_pool(1) as worker:
        worker.submit(run_pytest, folder, dict(os.environ)).result(100)
    return (folder / "printed").read_text()


def run_new_pytest(folder: Path) -> str:
    return run(folder, sys.executable, "-m", "pytest", *OPTIONS)


def under_pytest(
    folder: Path, chosen: list[Mistake], backend: str, start: Callable[[Path], str] = run_new_pytest
) -> dict[str, str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    # Where the package is not installed, its entry point is not there either.
    (folder / "conftest.py").write_text(
        "import importlib.metadata as m\nif not any(e.value == 'unisono.testing.plugin' "
        "for e in m.entry_points(group='pytest11')):\n    pytest_plugins = ['unisono.testing.plugin']\n"
    )
    for mistake in chosen:
        (folder / f"test_{mistake.name}.py").write_text(mistake.test(backend))
    said = start(folder)
    failures, _, summary = said.partition("warnings summary")
    parts = re.split(r"^_+ test_(\w+).* _+$", failures.partition("= short test summary")[0], flags=re.MULTILINE)
    blocks = dict(zip(parts[1::2], parts[2::2], strict=True))
    # A warning is in the summary of warnings.
    return {"forgotten_set_epoch": summary.partition("-- Docs")[0].partition("\n")[2], **blocks}


def under_notebook(folder: Path, chosen: list[Mistake]) -> dict[str, str]:
    import nbformat
    from nbformat import v4

    cells = [v4.new_code_cell(mistake.cell(), metadata={"tags": ["raises-exception"]}) for mistake in chosen]
    file = folder / "notebook.ipynb"
    nbformat.write(v4.new_notebook(cells=cells), file)
    # Under pytest, as this variable tells, a kernel does not show what its processes print.
    command = (
        "import os; os.environ['IPYTHONDIR'] = '.'; os.environ.pop('PYTEST_CURRENT_TEST'); "
        "from nbclient.cli import main; main()"
    )
    said = run(folder, sys.executable, "-c", command, "--inplace", "--timeout=100", str(file))
    assert not re.search("^Traceback", said), said
    blocks = {}
    for mistake, cell in zip(chosen, nbformat.read(file, as_version=4).cells, strict=True):
        errors = ["\n".join(output.traceback) for output in cell.outputs if output.output_type == "error"]
        blocks[mistake.name] = "\n".join(errors or [output.get("text", "") for output in cell.outputs])
    return blocks


# An error goes to the hook of uncaught ones, as it does from a script that fails.
ON_ENGINE = r"""
import runpy, sys
from engine_helpers import ON
from pathlib import Path
import unisono as un

if __name__ == "__main__":
    with ON[sys.argv[1]](4, Path.cwd()) as on:
        un.launch(un.Communicator.barrier, 2, on=on)
        for name in sys.argv[2:]:
            print(f"\n== {name}", file=sys.stderr)
            try:
                un.launch(runpy.run_path(f"{name}.py", run_name="__main__")["train"], 2, on=on, timeout=40)
            except Exception:
                sys.excepthook(*sys.exc_info())
        print("\n== ", file=sys.stderr)
"""


def under_engine(folder: Path, engine: str, chosen: list[Mistake]) -> dict[str, str]:
    for mistake in chosen:
        (folder / f"{mistake.name}.py").write_text(mistake.script(start=False))
    (folder / "driver.py").write_text(ON_ENGINE)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "driver.py", engine, *(mistake.name for mistake in chosen)]
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=800, cwd=folder, env=environment
    )
    parts = re.split(r"^== (\w*)$", ended.stderr, flags=re.MULTILINE)
    assert ended.returncode == 0, ended.stderr
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check(mistake: Mistake, block: str) -> None:
    """Assert what every block must be."""
    print(block)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES
    assert sum(map(block.count, mistake.sentences)) == 1
    number = mistake.line
    assert re.search(rf'(\.py"|In\[\d+\]), line {number},|\.py:{number}\b', block)
    assert "src/unisono" not in block
    assert "site-packages" not in block
    assert "direct cause" not in block


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wrong_size"])
def test_unisono_run(name: str, tmp_path: Path) -> None:
    check(NAMED[name], under_unisono_run(tmp_path, NAMED[name]))


def test_pytest(tmp_path: Path) -> None:
    chosen = [NAMED["wrong_size"], NAMED["unused_parameters"], NAMED["missing_package"]]
    blocks = under_pytest(tmp_path, chosen, "thread", run_forked_pytest)
    for mistake in chosen:
        check(mistake, blocks[mistake.name])


@pytest.mark.soak
@pytest.mark.parametrize("start", [under_unisono_run, under_torchrun])
@pytest.mark.parametrize("name", NAMES)
def test_scripts(start: Callable[[Path, Mistake], str], name: str, tmp_path: Path) -> None:
    check(NAMED[name], start(tmp_path, NAMED[name]))


@pytest.fixture(scope="module")
def all_blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("thread", "shm", "notebook")}
    return {
        # A killed thread would end pytest.
        "thread": under_pytest(folders["thread"], [m for m in MISTAKES if m.name != "killed_rank"], "thread"),
        # Warnings of processes are in their output, which pytest shows of tests that fail.
        "shm": under_pytest(folders["shm"], [m for m in MISTAKES if m.name != "forgotten_set_epoch"], "shm"),
        "notebook": under_notebook(folders["notebook"], MISTAKES),
    }


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("where", ["thread", "shm", "notebook"])
@pytest.mark.parametrize("name", NAMES)
def test_tests_and_notebooks(all_blocks: dict[str, dict[str, str]], where: str, name: str) -> None:
    if (where, name) not in (("thread", "killed_rank"), ("shm", "forgotten_set_epoch")):
        check(NAMED[name], all_blocks[where][name])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_engines(engine: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason="runs ranks on it")
    # A rank's warning is in the worker's output, and an engine does not know the signal that has ended a worker.
    others = {"forgotten_set_epoch", "killed_rank"}
    blocks = under_engine(tmp_path, engine, [m for m in MISTAKES if m.takes_comm and m.name != "forgotten_set_epoch"])
    for name, block in blocks.items():
        if name and name not in others:
            check(NAMED[name], block)
    assert "rank 1 of 2 was lost" in blocks["killed_rank"]
