"""Reports of what ranks are doing or did last."""
