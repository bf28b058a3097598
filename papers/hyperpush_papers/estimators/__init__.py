"""Every hypergradient estimator on one problem and several networks."""
