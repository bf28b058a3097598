"""The audit of a collaboration: gains by joining, harmful parties and records, and the costs of the audit."""
