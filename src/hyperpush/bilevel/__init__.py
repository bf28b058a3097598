"""Complete bilevel algorithms: `solve.py` alternates any inner solver and estimator; the other files are its parts."""
