"""Fragments of the changelog: each has a known kind and is one sentence; towncrier makes a section of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "changes"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
KINDS = {kind["directory"]: kind["name"] for kind in CONFIG["type"]}


def faults(name: str, text: str) -> list[str]:
    """Return what is wrong with a fragment."""
    found = []
    form = re.fullmatch(r"\d{4}\.(\w+)\.md", name)
    if form is None:
        found.append(f"{name} is not called NNNN.kind.md")
    elif form[1] not in KINDS:
        found.append(f"{name}: kinds are {', '.join(KINDS)}")
    sentence = text.rstrip("\n")
    if not re.fullmatch(r"[^\s-].*\.", sentence):
        found.append(f"{name} is not one sentence on one line that ends with a full stop")
    return found


def fragments() -> list[Path]:
    return sorted(path for path in FOLDER.iterdir() if path.name != Path(CONFIG["template"]).name)


def test_fragments_have_a_kind_and_a_sentence() -> None:
    assert not [fault for path in fragments() for fault in faults(path.name, path.read_text())]


def test_numbers_are_unique() -> None:
    numbers = [path.name.partition(".")[0] for path in fragments()]
    assert len(numbers) == len(set(numbers)), f"two fragments have one number: {numbers}"


def test_wrong_fragments_are_detected() -> None:
    assert not faults("0001.fixed.md", "It is right.\n")
    assert "kinds are added, changed" in faults("0001.feature.md", "It is right.\n")[0]
    assert "NNNN.kind.md" in faults("fixed.md", "It is right.\n")[0]
    for text in ("", "no full stop\n", "- A list.\n", "Two\nlines.\n"):
        assert "one sentence" in faults("0001.fixed.md", text)[0]


def test_towncrier_puts_a_release_above_the_others(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "changes").mkdir()
    shutil.copy(ROOT / CONFIG["template"], tmp_path / "changes")
    for name, text in {"0001.added.md": "One more.", "0002.fixed.md": "A fix.", "0003.fixed.md": "Another."}.items():
        (tmp_path / "changes" / name).write_text(text + "\n")
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", "9.8.7", "--date", "2030-01-02"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    before, start, after = (ROOT / "CHANGELOG.md").read_text().partition(CONFIG["start_string"])
    section = "## [9.8.7] - 2030-01-02\n\n### Added\n\n- One more.\n\n### Fixed\n\n- A fix.\n- Another.\n"
    assert (tmp_path / "CHANGELOG.md").read_text() == f"{before}{start}\n{section}\n{after.lstrip()}"
    assert [path.name for path in (tmp_path / "changes").iterdir()] == [Path(CONFIG["template"]).name]
