"""Partitioners: a file of this folder is one, found by its name."""
