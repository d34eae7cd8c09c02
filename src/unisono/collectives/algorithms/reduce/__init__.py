"""Reduce algorithms, one per file: rank 0 gets the reduction of all ranks' messages."""
