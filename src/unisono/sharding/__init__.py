"""Sharded training: optimizer states, gradients and parameters that each exist once over all ranks."""
