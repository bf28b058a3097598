"""BiG-Fed on the karate club: its methods compared by test loss."""
