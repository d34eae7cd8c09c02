"""Chooses algorithms by prediction: the machine's constants, fitted to measured calls, and predicted times."""
