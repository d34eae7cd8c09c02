"""The installed distribution of unisono: its source, and how to add optional packages."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from unisono.errors import UnavailableError

__all__ = ["install_command", "required", "source"]

_NAME = "unisono"
_OPTIONAL = re.compile(r"""(?P<need>[^;]+?)\s*;.*\bextra == ['"](?P<extra>[\w-]+)['"]""")
_CHECKOUT = Path(__file__).parents[3]


def source(*extras: str) -> str | None:
    """Return the pip arguments that install unisono again from its source; None if the source is unknown or gone.

    Args:
        extras: Names of extras to install.

    Example:
        >>> isinstance(source("cli"), str | None)
        True
    """
    record = _record()
    url = record.get("url", "")
    wanted = f"[{','.join(extras)}]" if extras else ""
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = unquote(parts.path)
        editable = "-e " if record.get("dir_info", {}).get("editable") else ""
        return editable + shlex.quote(path + wanted) if Path(path).exists() else None
    if "vcs_info" in record:
        url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
    return shlex.quote(f"{_NAME}{wanted} @ {url}") if url else None


def install_command(*extras: str) -> str:
    """Return the command that adds optional dependencies, such as the extra "mpi", to this installation.

    The command contains the folder, wheel or URL from which unisono was installed. If unisono's source is unknown or
    gone, the command lists the dependencies themselves, because a package index may contain a different package named
    unisono.

    Args:
        extras: Names of extras in unisono's metadata.

    Example:
        >>> install_command("remote").startswith("pip install ")
        True
    """
    return f"pip install {source(*extras) or ' '.join(map(shlex.quote, _requirements(extras)))}"


def required(module: str, why: str, *extras: str) -> Any:
    """Import and return a module of an optional package.

    Args:
        module: Full name of the module.
        why: What needs the package, as the beginning of the error's text.
        extras: Names of the extras that install it.

    Raises:
        UnavailableError: The package is not installed. The error says how to install it.

    Example:
        >>> required("json", "this example needs json").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"{why}: {install_command(*extras)}") from error


def _record() -> dict[str, Any]:
    """Return pip's record of the source (PEP 610), or an equivalent record for a checkout that is not installed."""
    try:
        text = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return {"url": _CHECKOUT.as_uri()} if (_CHECKOUT / "pyproject.toml").is_file() else {}
    record: dict[str, Any] = json.loads(text or "{}")
    return record


def _requirements(extras: tuple[str, ...]) -> list[str]:
    try:
        lines = distribution(_NAME).requires or []
    except PackageNotFoundError:
        return [f"/path/of/{_NAME}[{','.join(extras)}]"]
    matches = filter(None, map(_OPTIONAL.match, lines))
    return [match["need"] for match in matches if match["extra"] in extras]
