"""Algorithms simulated on network models, and replayed as pictures. Communicators never use this package."""

from __future__ import annotations

__all__: list[str] = []
