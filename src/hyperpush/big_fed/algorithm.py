"""BiG-Fed: private models on a graph, and a shared kernel that is learned from how they look to one another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import LOOP, Algorithm, BilevelState
from hyperpush.algorithms.inverse import down
from hyperpush.algorithms.pooled import common, mean
from hyperpush.algorithms.steps import check_step_sizes
from hyperpush.big_fed.cosine import Cosine, no_neighbors, pair_cost
from hyperpush.big_fed.curvature import Bend, Curvature, check_curvature
from hyperpush.big_fed.strangers import check_strangers
from hyperpush.checks import check_integer, check_nonnegative
from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput
from hyperpush.method import MethodInfo, Number, as_number
from hyperpush.networks import Network
from hyperpush.optimizers import StepSize, step_size_at
from hyperpush.problem import JointCost, Problem
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Scope, Sequence, Server


def info_of(network: Literal["server", "any"], sends: str, **more: Any) -> MethodInfo:
    """What all forms say alike, and what one sends where."""
    return MethodInfo(
        network=network,
        target="local",
        sends=sends,
        paper="Xing, Lu, Wu and Yu, BiG-Fed: bilevel optimization enhanced graph-aided federated learning, 2021",
        note="one outer cost of all clients' own inner solutions",
        fixed_point="x_L",
        example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "curvature": "hessian"} | more,
        matrices="form" in more and more["form"] == "blocks",
        lossy=network == "any",
        joint=True,
    )


BY_FORM: dict[str, MethodInfo] = {
    "blocks": info_of("server", "own params, both blocks and the hypers", form="blocks"),
    "products": info_of("server", "what is shown (may give params away), own part of the hypergradient"),
    "peers": info_of(
        "any", "what is shown (may give params away) to all who are reached, and the hypers", form="peers"
    ),
}


class _ByForm:
    """The info of an algorithm's form; that of the default form if the class is asked."""

    def __get__(self, algorithm: "BiGFed | None", owner: type) -> MethodInfo:
        return BY_FORM["products" if algorithm is None else algorithm.form]


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    origin: PyTree  # params at which blocks are taken
    shown: Float[Array, " d"]  # p_i, then H_i, then what comes back for it: ∂F/∂H_i, ∂F/∂p_i
    scale: Float[Array, ""]  # l_i of the message passing
    mass: Float[Array, ""]  # ω, the push-sum weight; 1 with a server


@final
class BiGFed(Algorithm):
    """Bilevel optimization enhanced graph-aided federated learning: private models, and a kernel that all share.

    Each client has params θ_i of its own; the hyper φ is common. F is the task's outer cost: a `Cosine` of what the
    clients show, with the mean of their own outer costs if it has one; or only that mean. With the blocks C_i
    (curvature of the inner cost g_i) and J_i = ∂²_φθ g_i of client i (Xing, Lu, Wu and Yu 2021, algorithm 1):

        θ_i⁺ = θ_i − β_k ∂_θ g_i(φ, θ_i)
        φ⁺ = φ − α_k Σ_i (∂_φF − J_i (C_i + εI)⁻¹ ∂_{θ_i}F)(φ, θ⁺)

    The inner costs know nothing of each other, so that blocks are all there is. They are taken at θ_i before the step.

    `form` says who computes. `"blocks"`: clients send θ_i, C_i and J_i; the server does the rest, as in the paper.
    `"products"`: they send p_i, the server answers with ∂F/∂p_i, and each solves with its own block by conjugate
    gradients. `"peers"`: no server; p goes over the links of the graph and H = Mp to whoever can be reached. Each draws
    negatives among whom it heard; ∂F/∂H returns over the links of the graph, and φ agrees by push-sum.

    **Use it** where clients sit on a graph whose neighbors should be alike. **Avoid it** where params are secret: what
    is shown gives θ_i away where φ can be inverted, to the server of "products" and to all that "peers" reach. A peer
    that hears no stranger has no negatives, only attraction: `hp.solve` warns of it, and refuses a network where that
    is so for all.

    Departures from the paper:

    1. "products", "peers" and Gauss–Newton blocks are not in it.
    2. On links that change, the way back of "peers" is not the way forth: a heuristic.

    Args:
        steps: Iterations. With 0 only φ is averaged.
        outer_step_size: α, above 0; a number or a schedule by iteration. TTSA's choice falls like k^−3/5.
        inner_step_size: β, above 0; a number or a schedule by iteration. TTSA's choice falls like k^−2/5.
        form: `"blocks"`, `"products"` or `"peers"`.
        curvature: C: `"hessian"`, or `"gauss-newton"`, its part without negative eigenvalues. That one needs a task
            whose inner cost is a pair (model, loss).
        damping: ε, 0 or more. Larger values are safer and bias φ towards ∂_φF.
        inner_steps: Steps on θ per iteration, at least 1. With several, take the blocks `"after"` them.
        blocks_at: Take blocks `"before"` or `"after"` the steps on θ.
        batch_size: Training examples per step, drawn anew each time; None uses all.
        solver_steps: Steps of conjugate gradients, at least 1; "blocks" solves directly.
        pushes: Rounds of push-sum on φ per iteration of "peers", at least 1.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.
    """

    info: ClassVar[MethodInfo] = _ByForm()  # pyright: ignore[reportAssignmentType]

    steps: int = eqx.field(static=True)
    outer_step_size: StepSize = eqx.field(converter=as_number)
    inner_step_size: StepSize = eqx.field(converter=as_number)
    form: Literal["blocks", "products", "peers"] = eqx.field(static=True, default="products")
    curvature: Curvature = eqx.field(static=True, default="gauss-newton")
    damping: Number = eqx.field(converter=as_number, default=0.1)
    inner_steps: int = eqx.field(static=True, default=1)
    blocks_at: Literal["before", "after"] = eqx.field(static=True, default="before")
    batch_size: int | None = eqx.field(static=True, default=None)
    solver_steps: int = eqx.field(static=True, default=20)
    pushes: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        check_integer("BiGFed.steps", self.steps, minimum=0)
        check_step_sizes(self, "outer_step_size", "inner_step_size")
        check_nonnegative("BiGFed.damping", self.damping)
        for field in ("inner_steps", "solver_steps", "pushes"):
            check_integer(f"BiGFed.{field}", getattr(self, field), minimum=1)
        check_integer("BiGFed.batch_size", self.batch_size, minimum=1, optional=True)

    def check_task(self, task: Any) -> None:
        """Refuse a joint cost that is no `Cosine`, a graph of other clients, and Gauss–Newton of a cost in one part."""
        super().check_task(task)
        if task.joint and not isinstance(task.outer, Cosine):
            raise InvalidInput("task.outer", type(task.outer).__name__, "hp.big_fed.Cosine(…), or a client's own cost")
        check_curvature(task.problem, self.curvature)

    def check_network(self, network: Network, task: Any) -> None:
        """Refuse a network of other clients than the graph's, or one on which peers would have no negatives."""
        cosine = task.outer
        if isinstance(cosine, Cosine):
            check_clients(cosine, network.clients)
            if self.form == "peers":
                check_strangers(cosine, network, self.steps, stride=self.exchanges)

    @property
    def exchanges(self) -> int:
        """Exchanges in an iteration of "peers": three to pass messages, then the pushes."""
        return 3 + self.pushes

    # ---------------------------------------------------------------- one client's parts

    def program(self, problem: Problem) -> Node:
        start = Sequence() if self.form == "peers" else common("hyper")
        iteration = {"blocks": self._blocks, "products": self._products, "peers": self._peers}[self.form](problem)
        return Scope(
            Sequence(start, Repeat(Sequence(Local(self._train(problem)), iteration), self.steps, name=LOOP)),
            self._enter(problem),
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )

    def _enter(self, problem: Problem):
        def enter(state: BilevelState, ctx: Context) -> _State:
            cosine = cosine_of(problem)
            if cosine is not None:
                check_clients(cosine, ctx.clients)
            one = jnp.ones(())
            return _State(state.params, state.hyper, state.params, shown(problem, state), one, one)

        return enter

    def _train(self, problem: Problem):
        def train(state: _State, ctx: Context) -> _State:
            rate = step_size_at(self.inner_step_size, ctx.round)

            def step(number, params):
                batch = draw(ctx.data.train, self.batch_size, jax.random.fold_in(ctx.key, number))
                return down(params, problem.inner_gradient(params, state.hyper, batch), rate)

            params = jax.lax.fori_loop(0, self.inner_steps, step, state.params)
            here, _ = present(problem, ctx)
            params = jax.tree.map(lambda new, old: jnp.where(here, new, old), params, state.params)
            origin = state.params if self.blocks_at == "before" else params
            after = replace(state, params=params, origin=origin)
            return replace(after, shown=shown(problem, after))

        return train

    def _bend(self, problem: Problem, state: _State, ctx: Context) -> Bend:
        batch = draw(ctx.data.train, self.batch_size, ctx.key)
        return Bend(problem, self.curvature, self.damping, state.origin, state.hyper, batch)

    def _own_slopes(self, problem: Problem, state: _State, ctx: Context) -> tuple[PyTree, PyTree] | None:
        """The client's part of the gradients of the mean of own outer costs; None if there are none."""
        own = own_costs(problem)
        if own is None:
            return None
        here, count = present(problem, ctx)
        batch = draw(ctx.data.outer, self.batch_size, jax.random.fold_in(ctx.key, 1))
        slopes = own.outer_gradients(state.params, state.hyper, batch)
        return jax.tree.map(lambda g: jnp.where(here, g, 0) / count, slopes)

    def _part(self, problem: Problem, state: _State, ctx: Context) -> PyTree:
        """The client's part of dF/dφ, once `shown` is ∂F/∂p_i: their sum is dF/dφ."""
        slopes = self._own_slopes(problem, state, ctx)
        cosine = cosine_of(problem)
        if cosine is not None:
            _, back = jax.vjp(representation(problem, cosine), state.params, state.hyper)
            along = back(state.shown)
            slopes = along if slopes is None else jax.tree.map(jnp.add, slopes, along)
        assert slopes is not None
        bend = self._bend(problem, state, ctx)
        return jax.tree.map(jnp.subtract, slopes[1], bend.across(bend.solve(slopes[0], self.solver_steps)))

    # ---------------------------------------------------------------- who computes

    def _blocks(self, problem: Problem) -> Node:
        cosine = cosine_of(problem)

        def send(state: _State, ctx: Context) -> PyTree:
            blocks = self._bend(problem, state, ctx).blocks()
            # A real server remembers the round and φ; here it is told.
            return ctx.round, state.hyper, state.params, blocks, self._own_slopes(problem, state, ctx)

        def compute(messages: PyTree, key: PRNGKeyArray) -> PyTree:
            round, hypers, params, (curvatures, jacobians), slopes = messages
            hyper = jax.tree.map(lambda h: h[0], hypers)
            if slopes is None:
                slopes = jax.tree.map(jnp.zeros_like, (params, hypers))
            along_params, along_hyper = slopes[0], jax.tree.map(lambda s: jnp.sum(s, axis=0), slopes[1])
            if cosine is not None:
                represent, value = jax.vmap(representation(problem, cosine), (0, None)), cosine.cost

                def cost(params, hyper):
                    return value(represent(params, hyper), round[0])

                along_params, along_hyper = jax.tree.map(
                    jnp.add, (along_params, along_hyper), jax.grad(cost, argnums=(0, 1))(params, hyper)
                )
            right = jax.vmap(lambda tree: ravel_pytree(tree)[0])(along_params)
            q = jnp.linalg.solve(curvatures, right[..., None])[..., 0]
            flat, restore = ravel_pytree(along_hyper)
            slope = restore(flat - jnp.einsum("nhp,np->h", jacobians, q))
            after = down(hyper, slope, step_size_at(self.outer_step_size, round[0]))
            return jax.tree.map(lambda h, like: jnp.broadcast_to(h, like.shape), after, hypers)

        return Server(send, compute, receive=lambda state, hyper, ctx: replace(state, hyper=hyper))

    def _products(self, problem: Problem) -> Node:
        cosine = cosine_of(problem)

        def step(state: _State, average: PyTree, ctx: Context) -> _State:
            return replace(
                state, hyper=down(state.hyper, average, ctx.clients * step_size_at(self.outer_step_size, ctx.round))
            )

        outer = mean(lambda state, ctx: self._part(problem, state, ctx), step)
        if cosine is None:
            return outer

        def slopes(messages: PyTree, key: PRNGKeyArray) -> Float[Array, "n d"]:
            round, shown = messages
            return jax.grad(cosine.cost)(shown, round[0])

        asked = Server(
            send=lambda state, ctx: (ctx.round, state.shown),
            compute=slopes,
            receive=lambda state, slope, ctx: replace(state, shown=slope),
        )
        return Sequence(asked, outer)

    def _peers(self, problem: Problem) -> Node:
        def step(state: _State, ctx: Context) -> _State:
            rate = ctx.clients * step_size_at(self.outer_step_size, ctx.round) / state.mass
            return replace(state, hyper=down(state.hyper, self._part(problem, state, ctx), rate))

        def send(state: _State, ctx: Context) -> PyTree:
            return jax.tree.map(lambda h: state.mass * h, state.hyper), state.mass

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            z, mass = inbox.mix(send(state, ctx))
            return replace(state, hyper=jax.tree.map(lambda z: (z / mass).astype(z.dtype), z), mass=mass)

        push = Exchange(send, receive, conserved=True)
        agree = push if self.pushes == 1 else Repeat(push, self.pushes, name="push-sum")
        cosine = cosine_of(problem)
        if cosine is None:
            return Sequence(Local(step), agree)
        return Sequence(*message_passing(cosine), Local(step), agree)


def cosine_of(problem: Problem) -> Cosine | None:
    """The cost of the graph; None if clients have costs of their own only."""
    return problem.outer if isinstance(problem.outer, Cosine) else None


def own_costs(problem: Problem) -> Problem | None:
    """The problem with the clients' own outer costs only; None if they have none."""
    if not isinstance(problem.outer, JointCost):
        return problem
    if problem.outer.own is None and problem.outer_penalty is None:
        return None
    return replace(problem, outer=problem.outer.own or no_cost)


def no_cost(params: PyTree, hyper: PyTree, batch: PyTree) -> Float[Array, ""]:
    """An outer cost that is not there: a penalty alone counts."""
    return jnp.zeros(())


def representation(problem: Problem, cosine: Cosine) -> Callable[[PyTree, PyTree], Float[Array, " d"]]:
    """What a client shows of its params and hyper."""
    return lambda params, hyper: cosine.represent(problem.whole(params), hyper)


def shown(problem: Problem, state: Any) -> Float[Array, " d"]:
    """What a client in this state shows; one zero if there is no graph."""
    cosine = cosine_of(problem)
    return jnp.zeros((1,)) if cosine is None else representation(problem, cosine)(state.params, state.hyper)


def present(problem: Problem, ctx: Context) -> tuple[Array, Array]:
    """Whether the client takes part in this round, and how many do."""
    cosine = cosine_of(problem)
    if cosine is None:
        return jnp.ones((), bool), jnp.asarray(ctx.clients)
    here = cosine.graph.at(ctx.round)[1]
    return here[ctx.client], jnp.sum(here)


def check_clients(cosine: Cosine, clients: int) -> None:
    """Refuse a graph of other clients than those that run."""
    if cosine.graph.clients != clients:
        raise InvalidInput("graph", f"{cosine.graph.clients} clients", f"{clients}, as the network")


def message_passing(cosine: Cosine) -> tuple[Node, Node, Node]:
    """On states with `shown` and `scale`: ∂F/∂p_i in place of p_i, by three exchanges.

    Forward and backward go over the links of the graph. In between everybody shows its H to whoever can be reached: to
    neighbors, which are compared with, and to those who may have drawn it or be drawn. Where only some of those are
    heard who are no neighbors, they stand for all of them.
    """

    def row(ctx: Context) -> Float[Array, " n"]:
        return cosine.graph.at(ctx.round)[0][ctx.client]

    def degree(inbox: Inbox, ctx: Context) -> Float[Array, ""]:
        assert inbox.heard is not None
        return jnp.sum(row(ctx) * inbox.heard)

    def weights(state: Any, ctx: Context) -> Float[Array, " n"]:
        return row(ctx)

    def forward(state: Any, inbox: Inbox, ctx: Context) -> Any:
        left, _ = cosine.scales(degree(inbox, ctx))
        mine = cosine.self_loops * shown(state, ctx)
        return replace(state, shown=left * (mine + inbox.total), scale=left)

    def shown(state: Any, ctx: Context) -> Float[Array, " d"]:
        return cosine.scales(jnp.sum(row(ctx)))[1] * state.shown

    def rate(ctx: Context) -> Float[Array, ""]:
        return cosine.rate(row(ctx), jnp.sum(strangers(ctx)))

    def strangers(ctx: Context) -> Array:
        return no_neighbors(*cosine.graph.at(ctx.round))[ctx.client]

    def compare(state: Any, inbox: Inbox, ctx: Context) -> Any:
        assert inbox.heard is not None
        others, rates = inbox.total
        chance, far = cosine.uniform(ctx.round), strangers(ctx)
        mine, theirs = rate(ctx) + chance[ctx.client], rates + chance[:, ctx.client]
        near = far & inbox.heard
        scale = jnp.sum(far) / jnp.maximum(jnp.sum(near), 1)
        counts = scale * near * (jnp.floor(mine) + jnp.floor(theirs))
        # Every pair counts twice in F, once from either end.
        slope = jax.grad(pair_cost)(state.shown, others, 2 * row(ctx) * inbox.heard, counts)
        return replace(state, shown=slope / jnp.sum(cosine.graph.at(ctx.round)[1]))

    def backward(state: Any, inbox: Inbox, ctx: Context) -> Any:
        _, right = cosine.scales(jnp.sum(row(ctx)))
        mine = cosine.self_loops * state.scale * state.shown
        return replace(state, shown=right * (mine + inbox.total))

    return (
        Exchange(shown, forward, weights, observe=True),
        Exchange(lambda state, ctx: (state.shown, rate(ctx)), compare, "ones", "stack", observe=True),
        Exchange(lambda state, ctx: state.scale * state.shown, backward, weights),
    )
