"""All ranks end with the reduction of everybody's message: one file, one algorithm."""
