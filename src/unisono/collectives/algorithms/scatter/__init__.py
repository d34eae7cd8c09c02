"""Scatter algorithms, one per file: each rank receives its own chunk of rank 0's message."""
