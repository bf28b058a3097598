"""Twenty clients with digits turned three ways: what a model of one's own wins."""

from typing import Annotated

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count


class Quickstart(Config):
    """Options of the first thing to run."""

    clients: Annotated[int, Field(ge=3)] = Field(default=20, description="Number of clients, in three clusters.")
    outer_steps: Count = Field(default=8, description="Steps of the personal part.")
    steps: Count = Field(default=150, description="Steps of training before each of them.")
    seed: int = Field(default=0, ge=0, description="Decides who has what, the network and the models.")


EXPERIMENT = Experiment(
    "quickstart",
    "Start here: what personal models win for twenty clients, in a minute or two.",
    Quickstart,
    defer("hyperpush.studies.quickstart.study:run_quickstart"),
)
