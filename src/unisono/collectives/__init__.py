"""Collectives: the description of each one, and the plan of a call."""
