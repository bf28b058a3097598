"""Version of the installed package `hyperpush`."""

from importlib.metadata import version

__version__ = version("hyperpush")
