"""Choice of an algorithm by simulation: constants of the machine, their fit to measured calls, and predictions."""
