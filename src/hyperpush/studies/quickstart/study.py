"""The comparison of four methods on digits, in a table, a figure and a sentence."""

from typing import Any

from hyperpush.runs.report.figures import panels
from hyperpush.runs.run import StudyRun
from hyperpush.studies.personalize import study as personalize
from hyperpush.studies.personalize.config import Personalize
from hyperpush.studies.quickstart.config import Quickstart

TITLES = {
    "local": "everyone alone",
    "sgp": "one model for all",
    "pl": "own scale of every class (PL)",
    "mtl": "own mixture of three models (MTL)",
}


def run(config: Quickstart, run: StudyRun) -> dict[str, Any]:
    """scikit-learn's digits, a random directed network."""
    asked = Personalize(
        methods=tuple(TITLES),
        clients=config.clients,
        seed=config.seed,
        estimator="tracked",
        steps=config.steps,
        again=config.steps,
        outer_steps=config.outer_steps,
    )
    result = personalize.run(asked, run)
    rows = {row["method"]: row for row in result["rows"]}
    clients = {detail["method"]: detail["clients"] for detail in result["details"]}
    best = max(("pl", "mtl"), key=lambda name: rows[name]["validation_accuracy"])
    said = sentence(rows, clients, best)
    _draw(run, clients, best)
    run.console.print(said)
    return {**result, "best": best, "sentence": said}


def sentence(rows: dict[str, Any], clients: dict[str, list[float]], best: str) -> str:
    """What was won, or not."""
    own, together, alone = (100 * rows[name]["accuracy"] for name in (best, "sgp", "local"))
    worst, before = (100 * rows[name]["accuracy_p10"] for name in (best, "sgp"))
    better = sum(a > b for a, b in zip(clients[best], clients["sgp"], strict=True))
    worse = sum(a < b for a, b in zip(clients[best], clients["sgp"], strict=True))
    verdict = "wins" if own > max(together, alone) else "does not win"
    name = TITLES[best][0].upper() + TITLES[best][1:]
    return (
        f"{name} {verdict}: {own:.1f} % of all test digits are recognized, against {together:.1f} % by "
        f"{TITLES['sgp']} and {alone:.1f} % with {TITLES['local']}; against one model for all, {better} clients gain, "
        f"{worse} lose, and the 10 % client goes from {before:.1f} % to {worst:.1f} %."
    )


def _draw(run: StudyRun, clients: dict[str, list[float]], best: str) -> None:
    """Each client's accuracy with one model for all, and with its own."""
    figure, (axes,) = panels()
    order = sorted(range(len(clients["sgp"])), key=lambda client: clients["sgp"][client])
    for place, client in enumerate(order):
        axes.plot([place, place], [clients["sgp"][client], clients[best][client]], color="gray", linewidth=0.8)
    for name, marker in (("local", "x"), ("sgp", "o"), (best, "^")):
        axes.plot([clients[name][client] for client in order], marker, markersize=4, label=TITLES[name])
    axes.set(xlabel="clients, from the worst with one model for all", ylabel="test accuracy")
    axes.legend(fontsize=6)
    run.figure("before-and-after", figure)
