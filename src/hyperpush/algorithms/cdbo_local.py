"""CDBO-Local: CDBO with one inner problem per client."""

from typing import ClassVar

from hyperpush.algorithms.cdbo import CDBO
from hyperpush.base.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.local_gradient import LocalGradient
from hyperpush.inner.base import InnerSolver
from hyperpush.inner.local_sgd import LocalSGD
from hyperpush.methods.base import MethodInfo


class CDBOLocal(CDBO):
    """CDBO with one inner problem per client: one hyper that is best on average for clients that train alone.

    Client i's own solution x_i*(λ) = argmin f_i(x, λ) replaces the shared one:

        min_λ (1/n) Σ_i F_i(x_i*(λ), λ)

    It is a baseline in "Personalized decentralized bilevel optimization over stochastic and directed networks".

    **Use it** with `inner=hp.LocalSGD(…)` and `hypergradient=hp.hypergradients.LocalGradient()`: params are
    never sent. **Avoid it** where clients should share params: it ends at x_L, where the mean of the clients' own
    hypergradients is zero.

    Args:
        inner: An inner solver without messages: `hp.LocalSGD(…)`. The default takes 1,000 steps and determines their
            size.
        hypergradient: `hp.hypergradients.LocalGradient(…)`.
        outer: Optimizer of the hyper, as in `PDBO`.
        steps: Steps of the hyper, 0 or more. With 0 only the inner problems are solved.
        restart: True trains from the start before every step; False continues; None decides as in `PDBO`.
        stop: Early stopping, as in `PDBO`; None takes all steps.
        remember: True lets the estimator continue from its last solution, as in `PDBO`.
        pushes: Rounds of push-sum per step, at least 1. With more, the clients' hypers agree better.
        tracked: True if clients track the mean hypergradient, as in `CDBO`.

    Raises:
        InvalidInput: An option is out of range, or `inner` is a solver with messages.

    Example:
        The clients' costs pull their own x_i = λ to 1, 2 and 6. The mean cost is least at λ = 3.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> task = hp.Task(
        ...     inner=lambda x, shift, a: (x - shift - a) ** 2 / 2, outer=lambda x, shift, b: (x - b) ** 2 / 2,
        ...     params=0.0, hypers=0.0, train=jnp.zeros((3, 1)), validation=jnp.array([[1.0], [2.0], [6.0]]),
        ...     common=True,
        ... )
        >>> method = hp.algorithms.CDBOLocal(
        ...     inner=hp.LocalSGD(steps=30, step_size=0.5), hypergradient=hp.hypergradients.LocalGradient(),
        ...     outer=hp.optimizer("sgd", learning_rate=0.3), steps=60,
        ... )
        >>> print(hp.solve(task, method, hp.networks.DirectedRing(3), key=0).hyper.round(2))
        3.0
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="any",
        target="local",
        sends="the hypers",
        paper="Personalized decentralized bilevel optimization over stochastic and directed networks",
        fixed_point="x_L",
        example={
            "inner": {"name": "LocalSGD", "steps": 5, "step_size": 0.1},
            "hypergradient": {"name": "LocalGradient"},
            "outer": {"name": "sgd", "learning_rate": 0.1},
            "steps": 2,
        },
    )

    inner: InnerSolver = LocalSGD(steps=1000)
    hypergradient: HypergradientEstimator = LocalGradient()

    def __check_init__(self):
        if self.inner.info.network != "none":
            raise InvalidInput("CDBOLocal.inner", type(self.inner).__name__, "LocalSGD(…): each client trains alone")
