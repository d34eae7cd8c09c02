"""`unisono verify` proves algorithms by name and files, and shows a counterexample of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.tools.cli import main

MUTANTS = Path(__file__).parents[4] / "mutants" / "algorithms"


def test_name_is_proved_for_each_of_its_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "ring", "--ranks", "1..5,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["all_gather/ring", "all_reduce/ring", "reduce_scatter/ring"]
    assert "proved for 1..5, 8 ranks; at 8: rounds 14, messages 14, chunks sent 14" in lines[1]


def test_refused_sizes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "all_gather/recursive_doubling", "--ranks", "2..6"]) == 0
    assert "proved for 2, 4 ranks" in (line := capsys.readouterr().out)
    assert "refuses 3, 5..6" in line


def test_json_has_the_proofs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "broadcast/chain", "--ranks", "3", "--option", "segments=5", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["proved"]["3"]["cost"] == {"rounds": 6, "messages": 5, "sent": 5}
    assert found["error"] is None


def test_wrong_file_ends_with_a_counterexample(capsys: pytest.CaptureFixture[str]) -> None:
    path = MUTANTS / "ring_adds_wrong_chunk.py"
    assert main(["verify", str(path), "--ranks", "1..64"]) == 1
    said = capsys.readouterr().out
    assert "WRONG  rank 0 of 2, all_reduce: step 1: chunk 0 is expected from rank 1" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rang"], "unknown algorithm 'rang'; known: bidirectional_ring, "),
        (["all_reduce/rang"], "unknown all_reduce algorithm 'rang'; known: "),
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["ring", "--ranks", "0..3"], "--ranks takes numbers from 1 and ranges"),
        (["all_reduce/ring", "--option", "segments=2"], "has no option 'segments'; it has none"),
        ([__file__], "has no function steps and no cost"),
    ],
)
def test_misuse_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err
