"""Barrier algorithms, one per file: no rank ends before every rank has begun."""
