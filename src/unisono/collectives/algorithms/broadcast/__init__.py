"""All ranks end with the message of rank 0: one file, one algorithm."""
