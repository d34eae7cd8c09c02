"""No rank ends before every rank has begun: one file, one algorithm."""
