"""Methods tuned alike, chosen on validation scores, reported over seeds (docs/guides/sweep.md)."""
