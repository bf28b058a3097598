"""Engines run a program for all clients: on one device, on several, or with one thread or process per client."""
