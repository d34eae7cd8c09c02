"""All-to-all algorithms, one per file: each rank receives its own chunk of every rank's message."""
