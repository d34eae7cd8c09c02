"""The documents of each version stay beside the others, and `latest` is the newest release."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True, text=True).stdout


def test_versions_of_the_site(tmp_path: Path) -> None:
    repository, site = tmp_path / "repository.git", tmp_path / "site"
    site.mkdir()
    subprocess.run(["git", "init", "--quiet", "--bare", str(repository)], check=True)
    for ref in ("main", "v0.9.0", "v0.10.0", "v0.11.0rc1", "main"):
        (site / "index.html").write_text(ref)
        subprocess.run([str(ROOT / ".ci" / "deploy-site"), str(site), ref, str(repository)], check=True)
    pages = {
        folder: git(repository, "show", f"gh-pages:{folder}/index.html")
        for folder in git(repository, "ls-tree", "-d", "--name-only", "gh-pages").split()
    }
    assert pages == {
        "dev": "main", "0.9.0": "v0.9.0", "0.10.0": "v0.10.0", "0.11.0rc1": "v0.11.0rc1", "latest": "v0.10.0"
    }  # fmt: skip
