"""Checks: one file per check; see `unisono.tools.doctor.examination.Check`."""
