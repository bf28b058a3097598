"""Twenty clients with digits turned three ways: what a model of one's own wins."""

from hyperpush.runs.config import Config
from hyperpush.studies.options import Count, option, study


class Quickstart(Config):
    """Options of the first thing to run."""

    clients: int = option(20, "Number of clients, in three clusters.", ge=3)
    outer_steps: Count = option(8, "Steps of the personal part.")
    steps: Count = option(150, "Steps of training before each of them.")
    seed: int = option(0, "Decides who has what, the network and the models.", ge=0)


EXPERIMENT = study(
    "quickstart", "Start here: what personal models win for twenty clients, in a minute or two.", Quickstart
)
