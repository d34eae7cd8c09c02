"""Codecs: each file is one, with the file's name, and ends in `CODEC = ...`."""
