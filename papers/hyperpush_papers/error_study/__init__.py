"""The error of hypergradient push by order, pushes, batch size and inner solution."""
