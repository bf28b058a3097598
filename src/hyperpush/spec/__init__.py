"""TOML files and options: read, checked, run like a study, and written back."""
