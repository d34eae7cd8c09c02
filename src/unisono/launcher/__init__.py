"""Start of ranks by `launch`: as threads of this process, or as processes of a forkserver."""

from __future__ import annotations

__all__: list[str] = []
