"""Partitioners: each file in this folder defines one partitioner, which is looked up by the file's name."""
