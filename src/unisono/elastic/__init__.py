"""Elastic jobs: recover from the loss of ranks, and add ranks to a running job."""

from unisono.elastic.admission import join
from unisono.elastic.recovery import Recovery

__all__ = ["Recovery", "join"]
