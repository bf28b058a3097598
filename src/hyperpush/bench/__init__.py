"""Benchmarks, found by name; each is declared like a study and measures speed and memory."""

from hyperpush.bench import config, peers
from hyperpush.runs.experiment import Experiment

BENCHES: dict[str, Experiment] = {bench.name: bench for bench in (*config.BENCHES, peers.BENCH)}
