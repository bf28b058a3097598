"""An estimator outside the package: the first term of the series that HGP sums."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

import hyperpush as hp
from hyperpush import extend, programs


class OneTerm(extend.HypergradientEstimator):
    """Estimate v_i = (1/n) ∂_λ F_i − η B_i ū, where ū is the push-sum average of all clients' (1/n) ∂_x F_j.

    Args:
        pushes: Number of averaging rounds.
        step_size: η. If η H̄ = I for the mean Hessian H̄, the estimate is the exact hypergradient.
    """

    info: ClassVar[extend.MethodInfo] = extend.MethodInfo(
        network="any",
        target="global",
        sends="one vector of the size of the params per push",
        paper="the first term of Terashita and Hara, arXiv:2210.02129",
        stable=False,
        example={"pushes": 5, "step_size": 0.5},
    )

    pushes: int = eqx.field(static=True)
    step_size: extend.Number

    def __check_init__(self):
        if self.pushes < 1:
            raise hp.InvalidInput("OneTerm.pushes", self.pushes, "1 or more")

    def program(self, problem: extend.Problem) -> programs.Node:
        def get(state, ctx):
            along_x, _ = extend.outer_gradient_shares(problem, state, ctx)
            return along_x, jnp.ones(())

        def put(state, mean, mass, ctx):
            _, along_hyper = extend.outer_gradient_shares(problem, state, ctx)
            examples = extend.full_batch(ctx.data.train)
            product = problem.jacobian_product(state.params, state.hyper, examples, mean)
            value = jax.tree.map(lambda direct, term: direct - self.step_size * term, along_hyper, product)
            return replace(state, value=value)

        return programs.Average(get, put, rounds=self.pushes)
