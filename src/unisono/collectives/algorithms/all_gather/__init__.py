"""All-gather algorithms, one per file: all ranks end with every rank's chunk."""
