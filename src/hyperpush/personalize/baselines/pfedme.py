"""Personal models that are drawn to a common one."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.checks import positive, whole
from hyperpush.data.batches import draw
from hyperpush.inner.fedavg import mean_by_size
from hyperpush.inner.step import Trained
from hyperpush.personalize.recipe import distance
from hyperpush.problem import Problem
from hyperpush.program import Context, Local, Node, Repeat, Sequence, Server, Within


class _State(eqx.Module):
    common: PyTree  # w
    own: PyTree  # θ
    hyper: PyTree


class PFedMe(eqx.Module):
    """min over w of the mean over clients of min_θ f_i(θ) + ½·`pull`·‖θ − w‖²; the results are the θ_i.

    `rounds` times, `local_rounds` times within: θ ≈ the inner minimum on a batch, by `steps` gradient steps at `rate`
    from where θ was; w_i ← w_i − common_rate·pull·(w_i − θ). Then w ← w + mixing·(mean of w_i − w). Dinh, Tran, Nguyen
    2020.
    """

    rounds: int = eqx.field(static=True)
    rate: float = eqx.field(static=True, converter=float)
    pull: float = eqx.field(static=True, converter=float, default=15.0)
    common_rate: float = eqx.field(static=True, converter=float, default=0.05)
    steps: int = eqx.field(static=True, default=5)
    local_rounds: int = eqx.field(static=True, default=20)
    mixing: float = eqx.field(static=True, converter=float, default=1.0)
    batch: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        whole("PFedMe.rounds", self.rounds, least=0)
        for name in ("steps", "local_rounds"):
            whole(f"PFedMe.{name}", getattr(self, name), least=1)
        for name in ("rate", "pull", "common_rate", "mixing"):
            positive(f"PFedMe.{name}", getattr(self, name))
        if self.batch is not None:
            whole("batch", self.batch, least=1)

    def program(self, problem: Problem) -> Node:
        def near(own, common, hyper, batch):
            return problem.inner(own, hyper, batch) + distance(self.pull, own, common)

        def train(state: _State, ctx: Context):
            def one(number, both):
                common, own = both
                batch = draw(ctx.data.inner, self.batch, jax.random.fold_in(ctx.key, number))
                pulled = Problem(lambda own, hyper, batch: near(own, common, hyper, batch), problem.outer)

                def descend(_, own):
                    return moved(own, pulled.inner_gradient(own, state.hyper, batch), -self.rate)

                own = jax.lax.fori_loop(0, self.steps, descend, own)
                away = jax.tree.map(jnp.subtract, common, own)
                return moved(common, away, -self.common_rate * self.pull), own

            common, own = jax.lax.fori_loop(0, self.local_rounds, one, (state.common, state.own))
            # The server mixes with the common model before the round: what it is moved by is as good.
            step = jax.tree.map(jnp.subtract, common, state.common)
            return _State(moved(state.common, step, self.mixing), own, state.hyper)

        average = Server(
            send=lambda state, ctx: state.common,
            compute=lambda common, key: mean_by_size(jnp.ones(jax.tree.leaves(common)[0].shape[0]), common),
            receive=lambda state, common, ctx: _State(common, state.own, state.hyper),
        )
        return Within(
            Repeat(Sequence(Local(train), average), self.rounds, name="PFedMe"),
            enter=lambda trained, ctx: _State(trained.params, trained.params, trained.hyper),
            leave=lambda trained, state, ctx: Trained(state.own, state.hyper),
        )


def moved(tree: PyTree, along: PyTree, length: float) -> PyTree:
    """tree + length·along."""
    return jax.tree.map(lambda a, b: a + length * b, tree, along)
