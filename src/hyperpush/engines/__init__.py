"""Engines host clients and interpret programs: on one device, on many, or one thread or process per client."""
