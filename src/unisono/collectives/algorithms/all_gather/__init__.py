"""All ranks end with every rank's chunk: one file, one algorithm."""
