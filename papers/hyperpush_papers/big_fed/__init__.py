"""BiG-Fed on the karate club."""
