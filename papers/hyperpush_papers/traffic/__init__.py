"""Speeds an hour ahead at road sensors."""
