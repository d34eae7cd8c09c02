"""Partitioners: each file in this folder is one, found by its name."""
