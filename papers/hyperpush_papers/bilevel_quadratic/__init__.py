"""Compare all bilevel algorithms on quadratics that differ between clients and have closed-form solutions."""
