"""What a method needs besides the nodes: base classes, states, problems, data, and types of options with a range.

Modules that these names come from import the nodes alone.
"""

from hyperpush.algorithms.base import Algorithm, BilevelState
from hyperpush.checks.ranges import Count, NonNegative, OptionalCount, OptionalPositive, Positive, Probability, Whole
from hyperpush.data.batches import Data, Ragged, draw, everything, ragged
from hyperpush.engines.simulate import evaluate
from hyperpush.hypergradients.base import HypergradientEstimator, HypergradientState, outer_gradient_shares
from hyperpush.inner.base import InnerSolver, InnerState, LinkEstimates
from hyperpush.method import Method, MethodInfo, Number, as_number
from hyperpush.networks import Network
from hyperpush.optimizers import Rate, Share, step_size_at
from hyperpush.problem import Problem
