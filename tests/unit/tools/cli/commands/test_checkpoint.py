"""`unisono checkpoint` shows its progress at a terminal, if rich can be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.tools.cli import main


@pytest.mark.parametrize("rich", [True, False])
def test_verify_at_a_terminal(
    rich: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "7"
    un.checkpoint.save(path, {"x": torch.ones(3)})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert main(["checkpoint", "verify", str(path)]) == 0
    said = capsys.readouterr().out
    assert ("verifying" in said) == rich
    assert "is whole: 1 tensors" in said
