"""Barrier algorithms, one per file: no rank leaves before every rank has entered."""
