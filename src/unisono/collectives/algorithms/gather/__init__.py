"""Gather algorithms, one per file: rank 0 receives every rank's chunk."""
