"""The checks: one file each, see `unisono.doctor.patient.Check`."""
