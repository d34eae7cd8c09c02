"""Tasks for idle ranks: futures and `map`, as `concurrent.futures` has them."""
