"""Twenty parties, some with harmful data: find them, and measure the gain of dropping them."""

from typing import Annotated

from hyperpush.base.config import Config
from hyperpush.base.limits import whole
from hyperpush_papers.common.options import Count, NonNegative, Seed, Several, Whole, option, study


class Quickstart(Config):
    """Options of the study `quickstart`."""

    parties: Several = option(20, "Number of parties.")
    shifted: Whole = option(3, "Parties that label every digit one too high.")
    marked: Whole = option(13, "Parties whose images have a mark at the edge that gives the label away.")
    records: Count = option(25, "Training records of each party.")
    trusted: Count = option(2, "Records of each party that are known to be right, for validation.")
    amplitude: NonNegative = option(3.0, "How bright a mark is; the brightest pixel of a digit is 1.")
    steps: Count = option(300, "Steps of every training.")
    outer_steps: Count = option(6, "Steps of the weights.")
    terms: Annotated[int, whole(1, 199)] = option(20, "Terms of HGP's series for the weights; predictions take 200.")
    by_record: bool = option(False, "Also learn one weight per record.")
    removals: Several = option(20, "Records whose removal is checked by retraining; every party's is, too.")
    seeds: Count = option(1, "Runs, each with data, links and a model of its own.")
    seed: Seed = option(0, "The first of the seeds.")


EXPERIMENT = study(
    "quickstart",
    "Start here: twenty parties find out whose data hurt, and no party shows data. Under a minute.",
    Quickstart,
)
