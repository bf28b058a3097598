"""The papers' figures and tables, each as a configuration and a function in its own module."""
