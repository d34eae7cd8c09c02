"""Each rank ends with one chunk of every rank's message, the one that was meant for it: one file, one algorithm."""
