"""Ready-made problems; each module makes one, with its data and starting point."""
