"""The demonstration: train a small network on several ranks, and prove that the result equals that of one rank."""

from __future__ import annotations

from unisono.tools.demo.run import DemoSettings, PreparedDemo, prepare, show

__all__ = ["DemoSettings", "PreparedDemo", "prepare", "show"]
