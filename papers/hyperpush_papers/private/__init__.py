"""LDP-DSBO on streams of quadratics: accuracy and privacy budget by round."""
