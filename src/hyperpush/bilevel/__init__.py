"""Complete bilevel algorithms, one file each."""
