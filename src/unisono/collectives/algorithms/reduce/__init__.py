"""Reduce algorithms, one per file: rank 0 ends with the reduction of all ranks' messages."""
