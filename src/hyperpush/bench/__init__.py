"""Benchmarks, found by name; each is declared like a study and measures speed and memory."""

from hyperpush.bench.config import BENCHES as BENCHES
