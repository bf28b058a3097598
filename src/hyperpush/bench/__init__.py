"""Benchmarks, found by name; each is declared like an experiment and measures speed and memory."""

from hyperpush.bench import memory, peers, rounds, scale, training
from hyperpush.runs.experiment import Experiment

BENCHES: dict[str, Experiment] = {
    bench.name: bench for bench in (memory.BENCH, peers.BENCH, rounds.BENCH, scale.BENCH, training.BENCH)
}
