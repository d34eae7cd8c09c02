"""Examination of a host: whether it can run ranks, with which transports, and if not, how to fix that.

A check is one file in `unisono.tools.doctor.checks`, looked up by name. Nothing here requires a working torch.
"""

from __future__ import annotations

from unisono.tools.doctor.examination import CHECKS, PORT, Finding, Target, examine

__all__ = ["CHECKS", "PORT", "Finding", "Target", "examine"]
