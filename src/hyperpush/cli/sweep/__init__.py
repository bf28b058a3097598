"""Methods tuned alike, chosen on validation scores, reported over seeds (docs/sweep.md)."""
