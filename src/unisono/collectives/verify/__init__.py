"""Checks of algorithms for any number of ranks, without tensors or processes."""
