"""A file is a codec, named as the file; it ends in `CODEC = ...`."""
