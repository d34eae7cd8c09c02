"""Transports around transports: each changes one behaviour and passes the rest on."""

from __future__ import annotations

__all__: list[str] = []
