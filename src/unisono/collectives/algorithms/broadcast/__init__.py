"""Broadcast algorithms, one per file: all ranks end with the message of rank 0."""
