"""The audit of a collaboration: who gains by joining, whose records hurt others, and what it cost to find out."""
