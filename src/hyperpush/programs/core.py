"""What a method written elsewhere needs besides the nodes: base classes, states, problems and data."""

from hyperpush.algorithms.base import Algorithm as Algorithm
from hyperpush.algorithms.base import BilevelState as BilevelState
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
from hyperpush.networks import Network as Network
from hyperpush.problem import Problem as Problem
