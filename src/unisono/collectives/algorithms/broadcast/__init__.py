"""Broadcast algorithms, one per file: all ranks receive rank 0's message."""
