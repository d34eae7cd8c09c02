"""Elastic jobs: recovery from lost ranks, and joining a running job."""

from __future__ import annotations

from unisono.elastic.admission import join
from unisono.elastic.recovery import Recovery

__all__ = ["Recovery", "join"]
