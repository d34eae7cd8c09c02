"""Starts ranks for `launch`: as threads of this process, or as processes from a forkserver."""

from __future__ import annotations

__all__: list[str] = []
