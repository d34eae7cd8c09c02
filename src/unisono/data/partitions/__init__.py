"""Partitioners: each file in this folder is one, looked up by name."""
