"""Reports of what the ranks are doing or did last."""
