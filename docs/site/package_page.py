"""The package's addresses, and the README for an index of packages, where relative links lead nowhere.

setup.py reads both when it builds. `python docs/site/package_page.py` prints the page;
`--repository URL` fails unless URL is the one below: a release must not point at somebody else's repository.
"""

from __future__ import annotations

import re
import sys

__all__ = ["REPOSITORY", "author_email", "page", "urls"]

REPOSITORY = "https://github.com/unisono/unisono"
"""Home of the project: every other address derives from this one."""

PICTURES = (".gif", ".jpg", ".png", ".svg", ".webp")

# Code comes first, so that what looks like a link there remains as it is.
LINK = re.compile(
    r"(?P<code>^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence) *$|`[^`\n]+`)"
    r"""|(?P<open>\]\(|^\[[^]\n]+\]: +|\b(?:src|srcset|href)=["'])(?![a-z][a-z+.-]*:|//)(?P<target>[^)"'\s]+)""",
    re.MULTILINE | re.DOTALL,
)


def urls(version: str) -> dict[str, str]:
    """Return the addresses for the package's metadata, by the labels that indexes know."""
    owner, name = REPOSITORY.rsplit("/", 2)[1:]
    return {
        "Documentation": f"https://{owner}.github.io/{name}/{version}/",
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/v{version}/CHANGELOG.md",
    }


def author_email() -> str:
    """Return an address that names the project and takes no mail: people write issues."""
    return f"{REPOSITORY.rsplit('/', 2)[1]}@users.noreply.github.com"


def page(readme: str, version: str) -> str:
    """Return a README of the repository's root with absolute links, to files as they were in this version."""

    def absolute(found: re.Match[str]) -> str:
        if found["code"]:
            return found["code"]
        target = found["target"]
        path, hash_, anchor = target.partition("#")
        # A picture must be the file itself; a page or a folder is what the repository shows of it.
        view = "raw" if path.endswith(PICTURES) else "blob"
        return f"{found['open']}{REPOSITORY}/{view}/v{version}/{path.removeprefix('./') or 'README.md'}{hash_}{anchor}"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    import tomllib
    from pathlib import Path

    root = Path(__file__).parents[2]
    if sys.argv[1:2] == ["--repository"]:
        if sys.argv[2:] != [REPOSITORY]:
            sys.exit(f"docs/site/package_page.py has REPOSITORY = {REPOSITORY!r}, but this is {sys.argv[2:]}")
    else:
        version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
        print(page((root / "README.md").read_text(), version), end="")
