"""Examination of a host: whether ranks can run on it, with which transports, and how to remove any obstacles.

Each check is a file in `unisono.tools.doctor.checks`, and is looked up by name. Importing this package does not require
a working torch.
"""

from unisono.tools.doctor.examination import CHECKS, PORT, Finding, Target, examine

__all__ = ["CHECKS", "PORT", "Finding", "Target", "examine"]
