"""Gather algorithms, one per file: rank 0 ends with every rank's chunk."""
