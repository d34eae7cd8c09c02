"""All-reduce algorithms, one per file: all ranks end with the reduction of all ranks' messages."""
