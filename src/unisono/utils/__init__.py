"""Helpers that training scripts share: parameters by name, buckets, flat tensors."""
