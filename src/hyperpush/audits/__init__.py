"""Audit a collaboration: find gains by joining, harmful parties and harmful records, and the costs of the audit."""
