"""Replays of algorithms and recorded runs, as self-contained HTML pages."""
