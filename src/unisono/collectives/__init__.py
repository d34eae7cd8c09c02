"""Collectives: how a call is made, its algorithm chosen, and carried out."""
