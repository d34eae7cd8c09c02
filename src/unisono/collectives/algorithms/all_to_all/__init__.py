"""All-to-all algorithms, one per file: each rank ends with its own chunk of every rank's message."""
