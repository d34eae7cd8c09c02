"""The demonstration: train a small network on several ranks, and prove that it equals one rank."""

from __future__ import annotations

from unisono.tools.demo.run import PreparedDemo, Settings, prepare, show

__all__ = ["PreparedDemo", "Settings", "prepare", "show"]
