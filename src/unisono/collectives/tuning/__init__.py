"""Choice of an algorithm by prediction: constants of the machine, their fit to measured calls, and predicted times."""
