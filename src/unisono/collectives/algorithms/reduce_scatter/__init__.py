"""Each rank ends with the reduction of its own chunk of everybody's message: one file, one algorithm."""
