"""Proofs that algorithms are correct for a number of ranks, without tensors or processes."""
