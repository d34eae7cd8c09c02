"""Conformance checks of every transport: plain functions of a `World`, in families."""

from __future__ import annotations

from unisono.testing.cases import CALLS
from unisono.testing.conformance import agreement, any_source, bad_input, collectives, failures, groups, messages, works
from unisono.testing.conformance.world import Check, World

__all__ = ["CHECKS", "Check", "World"]

_FAMILIES = (messages, any_source, works, groups, collectives, bad_input, agreement, failures)

CHECKS: tuple[Check, ...] = (
    *(getattr(family, name) for family in _FAMILIES for name in family.__all__ if name != "equals_reference"),
    *(collectives.equals_reference(call) for call in CALLS),
)
"""Every check. Its name is a sentence, and its docstring has the details."""
