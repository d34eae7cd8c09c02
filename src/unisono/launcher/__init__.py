"""Launchers: start ranks as threads, as processes, on executors, under mpirun, or from a script on several hosts."""

from __future__ import annotations

__all__: list[str] = []
