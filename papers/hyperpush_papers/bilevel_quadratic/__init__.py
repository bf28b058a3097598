"""Every bilevel algorithm on unlike quadratics with closed forms."""
