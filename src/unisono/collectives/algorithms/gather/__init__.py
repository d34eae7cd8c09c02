"""Rank 0 ends with every rank's chunk: one file, one algorithm."""
