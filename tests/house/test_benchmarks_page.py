"""docs/benchmarks.md and its pictures are made of the raw outputs beside them, and count every missed bound."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.tools.bench import Against, Result, Settings, Spread, heading, line

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
report: Any = importlib.import_module("_report")
page, chart, tables, raw, bounds = map(importlib.import_module, ("_page", "_chart", "_tables", "_raw", "_bounds"))
MADE = "run python benchmarks/_report.py --only"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for raw outputs, still empty."""
    monkeypatch.setattr(raw, "FOLDER", tmp_path)
    return tmp_path


def network(ranks: int, peer_over_own: float, peer: str = "gloo") -> str:
    """The output of network.py for one size."""
    ratio = Spread(peer_over_own / 2, peer_over_own, peer_over_own * 2)
    against = {peer: Against(100.0, ratio, 0)}
    time = Spread(40.0, 50.0, 60.0)
    result = Result("all_reduce", ranks, 1024, 256, "float32", "sum", "native", time, 0, 9, against)
    settings = Settings(backend="tcp", ranks=ranks, sizes=(1024,), against=(peer,))
    return (
        f"{heading(settings)}\n{line(result)}\n{bounds.BoundCheck(f'{ranks} ranks, 1 KiB, {peer}/own', ratio, 2.5)}\n"
    )


def test_page_is_made_of_the_raw_outputs() -> None:
    assert page.PATH.read_text() == page.page(), MADE
    assert chart.PATH.read_text() == chart.chart(), MADE
    assert chart.SPEED.read_text() == chart.speed(), MADE


def test_every_program_with_results_is_linked() -> None:
    found = {path.stem for path in (ROOT / "docs" / "benchmarks").iterdir()}
    assert found <= {script.stem for script in page.scripts()}
    made = page.page()
    assert all(f"(benchmarks/{name}.txt)" in made for name in found)


def test_list_of_programs_counts_missed_bounds(tmp_path: Path) -> None:
    script = tmp_path / "question.py"
    script.write_text('"""How fast?"""\n')
    run = raw.Raw("python benchmarks/question.py", "2026-01-02, 2 cores", "met     a: 2, at least 1 wanted\n")
    assert page.entry(script, run).endswith("`question.py`, 2026-01-02.")
    run = raw.Raw(run.command, run.conditions, run.output + "MISSED  b: 2, at least 3 wanted\n" * 2)
    assert page.entry(script, run).endswith("`question.py`, 2026-01-02 (2 bounds not met).")


def test_table_and_picture_of_the_network(folder: Path) -> None:
    assert "tcp, 2 ranks: no results" in chart.chart()
    assert "not measured yet" in chart.speed()
    raw.Raw("python benchmarks/network.py", "2026-01-02, 2 cores", network(2, 5.0) + network(4, 2.0)).write("network")
    shown = page.page()
    assert "| 1 KiB | 50.00 | 0.20 (0.10 to 0.40) | 50.00 | 0.50 (0.25 to 1.00) |" in shown
    assert "| `all_reduce` on tcp, up to 64 KiB | gloo | 0.2 to 0.5 |" in shown
    assert "from 2026-01-02 to 2026-01-02 on 2 cores." in shown
    assert "tcp, 2 ranks: no results" not in chart.chart()


def test_open_mpi_has_a_table_of_its_own(folder: Path) -> None:
    raw.Raw("python benchmarks/network.py", "2026-01-02, 2 cores", network(2, 5.0)).write("network")
    before = chart.chart()
    output = f"{network(2, 5.0)}# Open MPI v5\n{network(2, 2.0, 'mpi')}"
    raw.Raw("python benchmarks/network.py", "2026-01-02, 2 cores", output).write("network")
    gloo, mpi = tables.sweep(output).split("\n\n")
    assert "| 1 KiB | 50.00 | 0.20 (0.10 to 0.40) |" in gloo
    assert "2 ranks: own/Open MPI" in mpi
    assert "| 1 KiB | 50.00 | 0.50 (0.25 to 1.00) |" in mpi
    assert chart.chart() == before


def test_tables_of_other_formats() -> None:
    remote = f"{bounds.BoundCheck('shm, 1 MiB, own 2.0 us, torch 1.0 us, torch/own', Spread(0.4, 0.5, 0.6), 2)}\n"
    assert "| shm, 1 MiB | 2.0 us | 1.0 us | 0.50 (0.40 to 0.60) |" in tables.calls(remote)
    checked = "shm, 8 B, auto: 8.9 us unchecked, +9.0 us (+101.1 %)\n  MISSED: at most 5 us below 64 KiB\n"
    assert "| 8 B | 8.9 | +9.0 (+101.1 %) |" in tables.checks(checked)
    save = "save ours    4.00 ms (3.00 to 5.00)\nsave dcp    2.00 ms (1.00 to 3.00)\n"
    assert "| save | 4.00 ms (3.00 to 5.00) |  | 2.00 ms (1.00 to 3.00) |" in tables.saves(save)
    step = (
        "mlp  2 ranks, shm: step alone 1.0 ms, ddp 3.0, ours 2.0; ours/ddp 0.67; exposed 0.50 (0.40 to 0.60;"
        " 0.25 wanted; a barrier alone 0.00); processor 0.23 (0.33 wanted)"
    )
    assert "| mlp, 2 ranks | 1.0 | 3.0 | 2.0 | 0.67 | 0.50 (0.40 to 0.60) | 0.23 |" in tables.steps(step)
    ratio = bounds.BoundCheck("save: ours / DCP", Spread(1.5, 2.0, 2.5), 1, most=True)
    table = tables.expected(
        {"rpc_against_torch": remote, "averager_against_ddp": step, "checkpoint_speed": f"{ratio}\n"}
    )
    assert table.splitlines()[2:] == [
        "| training step, `GradientAverager` on shm, 2 ranks | DDP | 0.67 |",
        "| remote call on shm | `rpc_sync` | 2 |",
        "| checkpoint: save | DCP | 2 |",
    ]


def test_training_steps_between_hosts_are_shown() -> None:
    bound = bounds.BoundCheck("2 + 2 ranks, far, 1 MiB, own/gloo", Spread(0.6, 0.8, 0.9), 0.7, most=True)
    output = f"# training step, DDP on gloo/own: 1.50 (1.40 to 1.60)\n{bound}"
    assert "| 1 MiB | 0.80 (0.60 to 0.90) |" in tables.links(output)
    assert "| training step, gloo/own | 1.50 (1.40 to 1.60) |" in tables.links(output)


def test_unknown_output_is_shown_by_its_last_lines(folder: Path) -> None:
    question = page.QUESTIONS[0]
    shown = page.section(
        question, raw.Raw("python benchmarks/network.py", "2026-01-02, here", "not measured: no device\n")
    )
    assert "```text\nnot measured: no device\n```" in shown


def test_wrong_results_are_shown(folder: Path) -> None:
    output = f"{network(2, 5.0)}# wrong elements: 3 of gloo\n"
    shown = page.section(page.QUESTIONS[0], raw.Raw("python benchmarks/network.py", "2026-01-02, here", output))
    assert "**wrong elements: 3 of gloo**" in shown


def test_output_is_kept_beside_the_page(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "question.py"
    script.write_text("print('42 us')")
    report.measured(script).write("question")
    found = raw.Raw.read("question")
    assert (found.command, found.output) == ("python benchmarks/question.py", "42 us\n")
    assert found.conditions == report.machine()


def test_bounds_of_several_sizes() -> None:
    times = {8: Spread(55.0, 60.0, 66.0), 1 << 20: Spread(14.0, 15.0, 16.5)}
    own = Spread(90.0, 100.0, 120.0)
    results = [
        Result(
            "all_reduce", 4, nbytes, nbytes // 4, "float32", "sum", "ring", own, 0, 9, {"gloo": Against(1.0, each, 0)}
        )
        for nbytes, each in times.items()
    ]
    (over,) = bounds.mean_ratio("all", results, "gloo", 30)
    assert over.found.median == pytest.approx(30.0)
    (least,) = bounds.least_ratio("any", results, "gloo", 20)
    assert str(least) == "MISSED  any, gloo/own, least (at 1048576 B): 15.00 (14.00 to 16.50), at least 20 wanted"
    assert bounds.BoundCheck("x", Spread(1.0, 2.0, 3.0), 2.0, most=True).met
    assert not bounds.BoundCheck("x", Spread(1.0, 2.1, 3.0), 2.0, most=True).met
    assert bounds.mean_ratio("none", [], "gloo", 30) == bounds.least_ratio("none", [], "gloo", 20) == []


def test_markdown() -> None:
    assert bounds.markdown(("size", "ratio"), [("8 B", "1.02")]) == "| size | ratio |\n|---|---|\n| 8 B | 1.02 |"
