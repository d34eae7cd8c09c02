"""Rank 0 ends with the reduction of everybody's message: one file, one algorithm."""
