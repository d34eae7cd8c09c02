"""Each rank ends with its own chunk of the message of rank 0: one file, one algorithm."""
