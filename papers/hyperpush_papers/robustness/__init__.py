"""How often an estimator is wrong, and how often it says so, over families of problems and networks."""
