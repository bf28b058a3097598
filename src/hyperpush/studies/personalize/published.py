"""Published accuracies to stand beside ours; `published.toml` holds them, and says whose they are."""

import tomllib
from pathlib import Path

SOURCE = (
    "Personalized decentralized bilevel optimization over stochastic and directed networks, tables 1 and 4; "
    "*: Cooperative personalized bilevel optimization over random directed networks, table 1"
)
CELLS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))  # by data, network and method
NETWORKS = tuple(CELLS["emnist"])


def published_cell(data: str, network: str, method: str) -> str | None:
    """What the papers report for a method, average / 10 % client in per cent, if they do."""
    cells, parts = CELLS.get(data, {}).get(network, {}), sorted(method.split("+"))
    return next((cell for name, cell in cells.items() if sorted(name.split("+")) == parts), None)
