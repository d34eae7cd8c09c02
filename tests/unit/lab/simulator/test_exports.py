"""GOAL schedules and Chrome traces hold what the simulator runs; `unisono simulate` prints and writes them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from unisono.algorithms import ALGORITHMS, COLLECTIVES, chrome_trace, find, goal, plot_scaling, scaling, simulate
from unisono.tools.cli import main

LINE = re.compile(r"l(\d+): (?:(send|recv) (\d+)b (?:to|from) (\d+) tag (\d+)|calc (\d+))|l(\d+) requires l(\d+)")


def parsed(text: str) -> list[tuple[dict[int, tuple[Any, ...]], dict[int, set[int]]]]:
    """Operations and dependencies of each rank."""
    head, *lines = text.splitlines()
    ranks: list[tuple[dict[int, tuple[Any, ...]], dict[int, set[int]]]] = []
    for line in lines:
        if line.startswith("rank"):
            assert line == f"rank {len(ranks)} {{"
            ranks.append(({}, defaultdict(set)))
        elif line != "}":
            found = LINE.fullmatch(line)
            assert found, line
            label, verb, nbytes, peer, tag, calc, after, before = found.groups()
            if label:
                assert int(label) not in ranks[-1][0]
                ranks[-1][0][int(label)] = (verb, int(nbytes), int(peer), int(tag)) if verb else ("calc", int(calc))
            else:
                assert {int(after), int(before)} <= ranks[-1][0].keys()
                ranks[-1][1][int(after)].add(int(before))
    assert head == f"num_ranks {len(ranks)}"
    return ranks


def run(ranks: list[tuple[dict[int, tuple[Any, ...]], dict[int, set[int]]]]) -> Counter[tuple[int, int, int]]:
    """Run a schedule: sender, receiver and bytes of each message that has been sent and received."""
    done: list[set[int]] = [set() for _ in ranks]
    flying: dict[tuple[int, int, int], int] = {}
    delivered: Counter[tuple[int, int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, (operations, needs) in enumerate(ranks):
            for label, (verb, *given) in operations.items():
                if label in done[rank] or not needs[label] <= done[rank]:
                    continue
                if verb == "send":
                    assert (rank, given[1], given[2]) not in flying
                    flying[rank, given[1], given[2]] = given[0]
                elif verb == "recv":
                    if flying.get((given[1], rank, given[2])) != given[0]:
                        continue
                    del flying[given[1], rank, given[2]]
                    delivered[given[1], rank, given[0]] += 1
                done[rank].add(label)
                moved = True
    assert not flying
    assert [len(each) for each in done] == [len(operations) for operations, _ in ranks]
    return delivered


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_goal_runs_and_sends_what_is_simulated(collective: str) -> None:
    for name in ALGORITHMS[collective].names():
        size = 4 if find(collective, name).unsupported(5) else 5
        nbytes = 1000 if collective == "all_to_all" else 1003
        ranks = parsed(goal(collective, name, size, nbytes, gamma=1e-9))
        record = simulate(collective, name, size, nbytes, record=True).record
        assert run(ranks) == Counter((message.sender, message.receiver, message.nbytes) for message in record)


def test_goal_needs_equal_parts() -> None:
    with pytest.raises(ValueError, match="1003 bytes are not 5 equal parts"):
        goal("all_to_all", "pairwise", 5, 1003)


def test_goal_computes_reductions_before_the_next_step() -> None:
    operations, needs = parsed(goal("all_reduce", "ring", 2, 8, gamma=1e-9))[0]
    assert operations == {
        1: ("send", 4, 1, 0),
        2: ("recv", 4, 1, 0),
        3: ("calc", 4),
        4: ("calc", 0),
        5: ("send", 4, 1, 1),
        6: ("recv", 4, 1, 1),
        7: ("calc", 0),
    }
    found = {label: before for label, before in needs.items() if before}
    assert found == {3: {2}, 4: {1, 3}, 5: {4}, 6: {4}, 7: {5, 6}}


def test_chrome_trace_has_a_bar_and_an_arrow_for_each_message() -> None:
    found = simulate("all_reduce", "ring", 3, 3000, record=True)
    events = json.loads(chrome_trace(found))["traceEvents"]
    assert Counter(event["ph"] for event in events) == {"M": 3, "X": 12, "s": 12, "f": 12}
    bars = [event for event in events if event["ph"] == "X"]
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(found.makespan * 1e6)
    with pytest.raises(ValueError, match="pass record=True"):
        chrome_trace(simulate("all_reduce", "ring", 3, 3000))


def test_plot(tmp_path: Path) -> None:
    points = scaling("all_reduce", ["ring", "recursive_doubling"], [4, 8], [1024])
    assert [point.size for point in points] == [4, 4, 8, 8]
    plot_scaling(points, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().count("<use") >= 8


def test_missing_matplotlib_is_reported_before_the_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("unisono.tools.cli.commands.simulate.scaling", lambda *arguments: pytest.fail("simulated"))
    assert main(["simulate", "all_reduce", "ring", "--plot", "curves.svg"]) == 2
    assert "a plot needs matplotlib" in capsys.readouterr().err


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "all_reduce", "ring", "binomial", "--ranks", "8,64", "--bytes", "8,1M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["8", "B", "8", "140.0", "60.0*"]
    assert lines[5].split() == ["1", "MiB", "8", "1975.0*", "6351.5"]


def test_command_reads_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "all_reduce", "recursive_doubling", "--ranks", "4", "--bytes", "1000", "--json"]
    levels = ["--levels", "host:2:1us:10GB/s:1GB/s", "--alpha", "20us", "--bandwidth", "2G"]
    assert main([*words, *levels]) == 0
    found = json.loads(capsys.readouterr().out)
    # In the host 1 us + 0.1 us; between hosts 20 us, and two messages of 1 us each in turn on the link.
    assert found["points"][0]["seconds"] == pytest.approx(1.1e-6 + 22e-6)
    assert main([*words, "--overhead", "2us", "--alpha", "1us"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["seconds"] == pytest.approx(2 * 5.999e-6)


def test_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "broadcast", "binomial", "--ranks", "4", "--bytes", "1M"]
    assert main([*words, "--goal", str(tmp_path / "a.goal"), "--trace", str(tmp_path / "a.json")]) == 0
    assert run(parsed((tmp_path / "a.goal").read_text())).total() == 3
    assert len(json.loads((tmp_path / "a.json").read_text())["traceEvents"]) == 4 + 3 * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--alpha", "10"], "'10' is not a time; pass a number with s, ms, us or ns"),
        (["--bandwidth", "fast"], "'fast' is not a bandwidth"),
        (["--levels", "host:8"], "'host:8' is not a level"),
        (["--goal", "x", "--ranks", "2,4"], "pass one algorithm, one number of ranks and one size"),
        (["--bytes", "none"], "'none' is not a size"),
    ],
)
def test_command_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "all_reduce", "ring", *words]) == 2
    assert said in capsys.readouterr().err
