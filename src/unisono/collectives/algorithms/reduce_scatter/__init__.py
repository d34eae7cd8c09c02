"""Reduce-scatter algorithms, one per file: each rank gets the reduction of its own chunk of all messages."""
