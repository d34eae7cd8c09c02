"""Algorithms simulated on models of networks, and played as pictures. No call of a communicator comes through here."""

from __future__ import annotations

__all__: list[str] = []
