"""What a method needs besides the nodes: base classes, states, problems, data, and types of options with a range.

Modules that these names come from import the nodes alone.
"""

from hyperpush.algorithms.base import Algorithm as Algorithm
from hyperpush.algorithms.base import BilevelState as BilevelState
from hyperpush.checks.ranges import Count as Count
from hyperpush.checks.ranges import NonNegative as NonNegative
from hyperpush.checks.ranges import OptionalCount as OptionalCount
from hyperpush.checks.ranges import OptionalPositive as OptionalPositive
from hyperpush.checks.ranges import Positive as Positive
from hyperpush.checks.ranges import Probability as Probability
from hyperpush.checks.ranges import Whole as Whole
from hyperpush.data.batches import Data as Data
from hyperpush.data.batches import Ragged as Ragged
from hyperpush.data.batches import draw as draw
from hyperpush.data.batches import everything as everything
from hyperpush.data.batches import ragged as ragged
from hyperpush.engines.simulate import evaluate as evaluate
from hyperpush.hypergradients.base import HypergradientEstimator as HypergradientEstimator
from hyperpush.hypergradients.base import HypergradientState as HypergradientState
from hyperpush.hypergradients.base import outer_gradient_shares as outer_gradient_shares
from hyperpush.inner.base import InnerSolver as InnerSolver
from hyperpush.inner.base import InnerState as InnerState
from hyperpush.inner.base import LinkEstimates as LinkEstimates
from hyperpush.method import Method as Method
from hyperpush.method import MethodInfo as MethodInfo
from hyperpush.method import Number as Number
from hyperpush.method import as_number as as_number
from hyperpush.networks import Network as Network
from hyperpush.optimizers import Rate as Rate
from hyperpush.optimizers import Share as Share
from hyperpush.optimizers import step_size_at as step_size_at
from hyperpush.problem import Problem as Problem
