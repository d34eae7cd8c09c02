"""Reduce-scatter algorithms, one per file: each rank ends with the reduction of its own chunk of all messages."""
