"""Scatter algorithms, one per file: each rank ends with its own chunk of the message of rank 0."""
