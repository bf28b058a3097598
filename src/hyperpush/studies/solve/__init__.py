"""A bilevel task, ready-made or one's own, solved with short options."""
