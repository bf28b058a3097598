"""Personal models that are pulled to a common model."""

from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Count, OptionalCount, Positive, Whole
from hyperpush.data.batches import minibatch
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.inner.fedavg import mean_by_size
from hyperpush.methods.base import MethodInfo
from hyperpush.personalize.baselines.base import Near
from hyperpush.programs import Context, Local, Node, Repeat, Scope, Sequence, Server
from hyperpush.task.problem import Problem


class _State(eqx.Module):
    common: PyTree  # w
    own: PyTree  # θ
    hyper: PyTree


class PFedMe(InnerSolver):
    """Personalized federated learning with Moreau envelopes: personal models that are pulled to a common model.

    The common model w minimizes the mean over clients of min_θ f_i(θ) + ½·pull·‖θ − w‖². The results are the personal
    models θ_i, at which these minima are attained (Dinh, Tran and Nguyen, arXiv:2006.08848). In a round each client
    starts with w_i = w and repeats `local_steps` times:

        θ ≈ the minimum over θ on a batch, by `inner_steps` gradient steps from the last θ
        w_i ← w_i − common_step_size·pull·(w_i − θ)

    Then w ← w + mixing·(mean of w_i − w).

    **Use it** if personal models should stay near a common model. **Avoid it** without a server.

    Args:
        steps: Rounds with the server, 0 or more. 0 leaves the params unchanged.
        step_size: Step size of the gradient steps on θ, above 0. The steps diverge at 2/`pull` or above.
        pull: Strength of the pull to the common model, above 0. The paper uses 15; larger values make models alike.
        common_step_size: Step size of the steps on w, above 0.
        inner_steps: Gradient steps on θ per batch, at least 1.
        local_steps: Batches per round, at least 1.
        mixing: Share of the way that w moves to the mean of the w_i, above 0; 1 replaces w by the mean.
        batch_size: Examples per batch; None uses all.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import hyperpush as hp
        >>> inputs = jax.random.normal(jax.random.key(0), (4, 20, 2))
        >>> train = (inputs, (inputs[..., 0] > 0).astype(int))
        >>> model = (lambda key: jnp.zeros((2, 2)), lambda params, inputs: inputs @ params)
        >>> baseline = hp.personalize.PFedMe(20, 0.1, local_steps=2)
        >>> fitted = hp.personalize.fit(model, baseline, hp.networks.FullyConnected(4), train=train, key=0)
        >>> fitted.client(0).predict(jnp.array([[2.0, 0.0], [-2.0, 0.0]]))
        Array([1, 0], dtype=int32)
    """

    info: ClassVar[MethodInfo] = MethodInfo(
        network="server",
        target="inner",
        sends="params",
        paper="Dinh, Tran and Nguyen, Personalized federated learning with Moreau envelopes, arXiv:2006.08848",
        note="params end as the client's own",
        example={"steps": 2, "step_size": 0.05, "inner_steps": 2, "local_steps": 2},
    )

    steps: Whole = eqx.field(static=True)
    step_size: Positive = eqx.field(converter=as_number)
    pull: Positive = eqx.field(converter=as_number, default=15.0)
    common_step_size: Positive = eqx.field(converter=as_number, default=0.05)
    inner_steps: Count = eqx.field(static=True, default=5)
    local_steps: Count = eqx.field(static=True, default=20)
    mixing: Positive = eqx.field(converter=as_number, default=1.0)
    batch_size: OptionalCount = eqx.field(static=True, default=None)

    def program(self, problem: Problem) -> Node:
        def train(state: _State, ctx: Context):
            def one(number, both):
                common, own = both
                batch = minibatch(ctx.data.train, self.batch_size, jax.random.fold_in(ctx.key, number))
                pulled = replace(problem, penalty=Near(self.pull, common, problem.penalty))

                def descend(_, own):
                    return optax.tree.add_scale(own, -self.step_size, pulled.inner_gradient(own, state.hyper, batch))

                own = jax.lax.fori_loop(0, self.inner_steps, descend, own)
                away = optax.tree.sub(common, own)
                return optax.tree.add_scale(common, -self.common_step_size * self.pull, away), own

            common, own = jax.lax.fori_loop(0, self.local_steps, one, (state.common, state.own))
            # Clients scale their change by `mixing`, which equals mixing at the server.
            step = optax.tree.sub(common, state.common)
            return _State(optax.tree.add_scale(state.common, self.mixing, step), own, state.hyper)

        average = Server(
            send=lambda state, ctx: state.common,
            compute=lambda common, key: mean_by_size(jnp.ones(jax.tree.leaves(common)[0].shape[0]), common),
            receive=lambda state, common, ctx: _State(common, state.own, state.hyper),
        )
        return Scope(
            Repeat(Sequence(Local(train), average), self.steps, name="PFedMe"),
            enter=lambda trained, ctx: _State(trained.params, trained.params, trained.hyper),
            leave=lambda trained, state, ctx: InnerState(state.own, state.hyper),
        )
