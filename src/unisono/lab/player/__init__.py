"""Replays of algorithms and recorded runs, as HTML pages that need nothing else."""
