"""Reports on what the ranks are doing, or on what they did last."""
