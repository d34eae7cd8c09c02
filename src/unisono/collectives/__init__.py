"""Collectives: how a call is made, how its algorithm is chosen, and how it is carried out."""
