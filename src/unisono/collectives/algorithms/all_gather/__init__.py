"""All-gather algorithms, one per file: every rank receives every rank's chunk."""
