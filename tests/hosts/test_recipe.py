"""The recipe for two hosts in docs/how-to/several-hosts.md, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.testing.namespaced_ranks import obstacle

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "several-hosts.md"


@pytest.mark.soak
def test_two_namespaces_and_torchrun(tmp_path: Path) -> None:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    recipe = PAGE.read_text().partition("To try torchrun over real connections")[2]
    script, commands = (re.search(rf"```{language}\n(.*?)```", recipe, re.DOTALL) for language in ("python", "sh"))
    assert script is not None
    assert commands is not None
    (tmp_path / "train.py").write_text(script[1])
    # Names of other namespaces than those of a test that runs beside.
    own = re.sub(r"\bhost(?=\$|\d\b)", f"recipe{os.getpid()}-", commands[1])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", own], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"rank (\d): shm\+tcp \(\(0, 1\), \(2, 3\)\) 6\.0", done.stdout)
    assert sorted(told) == ["0", "1", "2", "3"], done.stdout + done.stderr
