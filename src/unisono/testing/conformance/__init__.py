"""Conformance laws of every transport: plain functions of a `World`, in families."""

from __future__ import annotations

from unisono.testing.cases import CALLS
from unisono.testing.conformance import agreement, any_source, bad_input, collectives, failures, groups, messages, works
from unisono.testing.conformance.world import Law, World

__all__ = ["LAWS", "Law", "World"]

_FAMILIES = (messages, any_source, works, groups, collectives, bad_input, agreement, failures)

LAWS: tuple[Law, ...] = (
    *(getattr(family, name) for family in _FAMILIES for name in family.__all__ if name != "equals_the_reference"),
    *(collectives.equals_the_reference(call) for call in CALLS),
)
"""Every law. Its name is a sentence, and its docstring has the details."""
