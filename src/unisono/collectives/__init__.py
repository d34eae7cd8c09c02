"""Collectives: the description of each one, and how a call is made, chosen and carried out."""
