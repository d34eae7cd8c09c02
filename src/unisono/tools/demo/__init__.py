"""Demonstration: trains a small network on several ranks, and proves that one rank gets the same result."""

from unisono.tools.demo.run import DemoSettings, PreparedDemo, prepare, show

__all__ = ["DemoSettings", "PreparedDemo", "prepare", "show"]
