"""Clients that sit on a known graph: private models, and a shared kernel that is learned from the graph (BiG-Fed)."""
