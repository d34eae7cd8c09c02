"""Simulates algorithms on network models, and replays them as animations. Communicators never use this package."""

from __future__ import annotations

__all__: list[str] = []
