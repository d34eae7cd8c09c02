"""The checks: one file each, see `unisono.tools.doctor.examination.Check`."""
