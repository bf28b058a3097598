"""Rates of wrong estimates, and of estimates that their status flags, over families of problems and networks."""
