"""Collectives: checks of arguments, choice of an algorithm, and execution."""
