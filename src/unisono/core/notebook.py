"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["html_table"]


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return an HTML table of names and values, for a `_repr_html_` method.

    Example:
        >>> html_table("a & b", {"rank": 0})
        '<table><caption>a &amp; b</caption><tr><th>rank</th><td>0</td></tr></table>'
    """
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
