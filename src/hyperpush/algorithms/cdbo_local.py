"""CDBO-Local: CDBO whose inner problems are everybody's own."""

from typing import ClassVar

from hyperpush.algorithms.cdbo import CDBO
from hyperpush.base.errors import InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.local_gradient import LocalGradient
from hyperpush.methods.base import MethodInfo


class CDBOLocal(CDBO):
    """CDBO whose inner problems are everybody's own: one hyper that is best on average for clients that train alone.

    It is `CDBO` with x_i*(λ) = argmin f_i(x, λ) in place of the shared solution:

        min_λ (1/n) Σ_i F_i(x_i*(λ), λ)

    "Personalized decentralized bilevel optimization over stochastic and directed networks" compares with it.

    **Use it** with `inner=hp.LocalSGD(…)` and `hypergradient=hp.hypergradients.LocalGradient()`: nothing of the inner
    problem is sent. **Avoid it** where clients should share params: it ends at x_L.

    Args:
        inner: An inner solver that sends nothing: `hp.LocalSGD(…)`. It has no default, as none solves alone without a
            step size.
        hypergradient: `hp.hypergradients.LocalGradient(…)`.
        outer: What moves the hyper, as in `PDBO`.
        steps: Steps of the hyper, 0 or more. With 0 only the inner problems are solved.
        restart: Train from the start before every step, or continue.
        stop: Early stopping, as in `PDBO`; None takes all steps.
        remember: Let the estimator continue from what it found in the step before, as in `PDBO`.
        pushes: Rounds of push-sum per step, at least 1. More let the clients' hypers agree better.
        tracked: Whether clients track the mean hypergradient, as in `CDBO`.

    Raises:
        InvalidInput: An option is out of range, or `inner` is a solver with messages.

    Example:
        Clients pull their own x_i = λ to 1, 2 and 6; the mean of their costs is least at λ = 3.

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

    hypergradient: HypergradientEstimator = LocalGradient()

    def __check_init__(self):
        if self.inner.info.network != "none":
            raise InvalidInput("CDBOLocal.inner", type(self.inner).__name__, "LocalSGD(…): everybody trains alone")
