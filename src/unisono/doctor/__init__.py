"""Examines a host: whether it can run ranks, by which transports, and if not, what mends it.

A check is one file in `unisono.doctor.checks`; it is found by its name. Nothing here needs torch to work.
"""

from __future__ import annotations

from unisono.doctor.examination import CHECKS, examine
from unisono.doctor.finding import Finding
from unisono.doctor.patient import PORT, Patient

__all__ = ["CHECKS", "PORT", "Finding", "Patient", "examine"]
