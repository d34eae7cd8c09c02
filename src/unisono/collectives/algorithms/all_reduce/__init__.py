"""All-reduce algorithms, one per file: every rank gets the reduction of all ranks' messages."""
