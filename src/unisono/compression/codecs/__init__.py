"""Codecs: each file defines the codec of the same name, and ends in `CODEC = ...`."""
