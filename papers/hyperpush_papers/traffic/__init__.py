"""Forecasts of speeds at road sensors, an hour ahead."""
