"""BiG-Fed: private models on a graph, and a shared kernel that is learned from how they look to one another."""

from dataclasses import replace
from typing import Any, ClassVar, Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hyperpush.bilevel.algorithm import LOOP, Bilevel
from hyperpush.bilevel.inverse import down
from hyperpush.bilevel.pooled import common, mean
from hyperpush.bilevel.steps import Step, check_step, step_at
from hyperpush.checks import not_negative, whole
from hyperpush.data.batches import draw
from hyperpush.errors import InvalidInput, unknown
from hyperpush.estimators.state import Declaration
from hyperpush.graph.cosine import Cosine, no_neighbours, pair_cost
from hyperpush.graph.problem import Bend, Curvature, GraphProblem, check_curvature, no_cost
from hyperpush.graph.strangers import check_strangers
from hyperpush.networks import Network
from hyperpush.problem import Problem
from hyperpush.program import Context, Exchange, Inbox, Local, Node, Repeat, Sequence, Server, Within

FORMS = ("blocks", "products", "peers")


def declaration(network: str, sends: str, matrices: bool = False) -> Declaration:
    """What all forms declare alike, and what one sends where."""
    return Declaration(
        network=network,
        target="local: one outer cost of all clients' own inner solutions",
        sends=sends,
        matrices=matrices,
        paper="Xing et al., BiG-Fed: bilevel optimization enhanced graph-aided federated learning",
        fixed_point="x_L",
    )


DECLARED: dict[str, Declaration] = {
    "blocks": declaration("a server", "own params, both blocks and the hypers", matrices=True),
    "products": declaration("a server", "what is shown (may give params away), own part of the hyper-gradient"),
    "peers": declaration("any", "what is shown (may give params away) to all who are reached, and the hypers"),
}


class _ByForm:
    """The declaration of an algorithm's form; that of the default form if the class is asked."""

    def __get__(self, algorithm: "BiGFed | None", owner: type) -> Declaration:
        return DECLARED["products" if algorithm is None else algorithm.form]


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    origin: PyTree  # params at which blocks are taken
    shown: Float[Array, " d"]  # p_i, then H_i, then what comes back for it: ∂F/∂H_i, ∂F/∂p_i
    scale: Float[Array, ""]  # l_i of the message passing
    mass: Float[Array, ""]  # ω, the push-sum weight; 1 with a server


@final
class BiGFed(eqx.Module):
    """θ_i⁺ = θ_i − β_k ∂_θ g_i(φ, θ_i),   φ⁺ = φ − α_k Σ_i (∂_φF − J_i (C_i + εI)^{-1} ∂_{θ_i}F)(φ, θ⁺).

    θ are the params, φ the common hyper, F the `cosine` cost of what the clients show (and, where the problem has one,
    the mean of their own outer costs). C_i and J_i are the blocks of client i at θ_i, before the step: the inner costs
    know nothing of each other, so that is all there is. C is the inner Hessian or its Gauss–Newton part
    (`curvature`), ε the `damping`. With `inner_steps` > 1 take the blocks `"after"` them.

    `form` says who computes. `"blocks"`: clients send θ_i, C_i and J_i, the server does the rest, as in the paper.
    `"products"`: they send p_i, what the server asks back is ∂F/∂p_i, and each solves with its own block by conjugate
    gradients. `"peers"`: no server; p over the links of the graph, the H = Mp to whoever can be reached, who draws
    negatives among whom it heard, ∂F/∂H back over the links of the graph, then φ by `rounds` of push-sum.

    What is shown is no secret: p = φθ_i gives θ_i away where φ can be inverted, to the server of "products" and to
    every client that the network reaches with "peers", not to neighbours alone. A peer that never hears somebody who
    is no neighbour has no negatives, only attraction: `optimise` warns of it, and refuses a network where that is so
    for all. On links that change, the way back of "peers" is not the way forth: a heuristic.

    Xing, Lu, Wu, Yu 2021, algorithm 1; α falling like k^-3/5 and β like k^-2/5 is TTSA's choice. "products", "peers"
    and the Gauss–Newton blocks are not in the paper.
    """

    declares: ClassVar[Declaration] = _ByForm()  # pyright: ignore[reportAssignmentType]

    iterations: int = eqx.field(static=True)
    outer_step: Step = eqx.field(static=True)
    inner_step: Step = eqx.field(static=True)
    cosine: Cosine | None = None
    form: Literal["blocks", "products", "peers"] = eqx.field(static=True, default="products")
    curvature: Curvature = eqx.field(static=True, default="gauss-newton")
    damping: float = eqx.field(static=True, converter=float, default=0.1)
    inner_steps: int = eqx.field(static=True, default=1)
    blocks_at: Literal["before", "after"] = eqx.field(static=True, default="before")
    batch: int | None = eqx.field(static=True, default=None)
    solver_steps: int = eqx.field(static=True, default=20)
    rounds: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        whole("BiGFed.iterations", self.iterations, least=0)
        check_step("BiGFed.outer_step", self.outer_step)
        check_step("BiGFed.inner_step", self.inner_step)
        choices = {"form": FORMS, "curvature": ("gauss-newton", "hessian"), "blocks_at": ("before", "after")}
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise unknown(f"BiGFed.{field}", str(getattr(self, field)), known)
        not_negative("BiGFed.damping", self.damping)
        for field in ("inner_steps", "solver_steps", "rounds"):
            whole(f"BiGFed.{field}", getattr(self, field), least=1)
        if self.batch is not None:
            whole("BiGFed.batch", self.batch, least=1)

    def check_network(self, network: Network) -> None:
        """Refuse a network of other clients than the graph's, or one on which peers would have no negatives."""
        if self.cosine is None:
            return
        check_clients(self.cosine, network.clients)
        if self.form == "peers":
            check_strangers(self.cosine, network, self.iterations, stride=3 + self.rounds)

    # ---------------------------------------------------------------- one client's parts

    def program(self, problem: Problem) -> Node:
        check_curvature(problem, self.curvature)
        if self.cosine is not None and not isinstance(problem, GraphProblem):
            raise InvalidInput("problem", type(problem).__name__, "a GraphProblem, which says what clients show")
        start = Sequence() if self.form == "peers" else common("hyper")
        iteration = {"blocks": self._blocks, "products": self._products, "peers": self._peers}[self.form](problem)
        return Within(
            Sequence(start, Repeat(Sequence(Local(self._train(problem)), iteration), self.iterations, name=LOOP)),
            self._enter(problem),
            leave=lambda before, state, ctx: replace(before, params=state.params, hyper=state.hyper),
        )

    def _here(self, ctx: Context) -> tuple[Array, Array]:
        """Whether the client takes part in this round, and how many do."""
        if self.cosine is None:
            return jnp.ones((), bool), jnp.asarray(ctx.clients)
        present = self.cosine.graph.at(ctx.round)[1]
        return present[ctx.client], jnp.sum(present)

    def _enter(self, problem: Problem):
        def enter(state: Bilevel, ctx: Context) -> _State:
            if self.cosine is not None:
                check_clients(self.cosine, ctx.clients)
            one = jnp.ones(())
            return _State(state.params, state.hyper, state.params, self._show(problem, state), one, one)

        return enter

    def _show(self, problem: Problem, state: Any) -> Float[Array, " d"]:
        if self.cosine is None or not isinstance(problem, GraphProblem):
            return jnp.zeros((1,))
        return problem.represent(state.params, state.hyper)

    def _train(self, problem: Problem):
        def train(state: _State, ctx: Context) -> _State:
            rate = step_at(self.inner_step, ctx.round)

            def step(number, params):
                batch = draw(ctx.data.inner, self.batch, jax.random.fold_in(ctx.key, number))
                return down(params, problem.inner_gradient(params, state.hyper, batch), rate)

            params = jax.lax.fori_loop(0, self.inner_steps, step, state.params)
            here, _ = self._here(ctx)
            params = jax.tree.map(lambda new, old: jnp.where(here, new, old), params, state.params)
            origin = state.params if self.blocks_at == "before" else params
            after = replace(state, params=params, origin=origin)
            return replace(after, shown=self._show(problem, after))

        return train

    def _bend(self, problem: Problem, state: _State, ctx: Context) -> Bend:
        batch = draw(ctx.data.inner, self.batch, ctx.key)
        return Bend(problem, self.curvature, self.damping, state.origin, state.hyper, batch)

    def _own_slopes(self, problem: Problem, state: _State, ctx: Context) -> tuple[PyTree, PyTree]:
        """The client's part of the gradients of the mean of own outer costs."""
        if problem.outer is no_cost:
            return jax.tree.map(jnp.zeros_like, (state.params, state.hyper))
        here, present = self._here(ctx)
        batch = draw(ctx.data.outer, self.batch, jax.random.fold_in(ctx.key, 1))
        slopes = problem.outer_gradients(state.params, state.hyper, batch)
        return jax.tree.map(lambda g: jnp.where(here, g, 0) / present, slopes)

    def _part(self, problem: Problem, state: _State, ctx: Context) -> PyTree:
        """The client's part of dF/dφ, once `shown` is ∂F/∂p_i: their sum is dF/dφ."""
        slopes = self._own_slopes(problem, state, ctx)
        if self.cosine is not None and isinstance(problem, GraphProblem):
            _, back = jax.vjp(problem.represent, state.params, state.hyper)
            slopes = jax.tree.map(jnp.add, slopes, back(state.shown))
        bend = self._bend(problem, state, ctx)
        return jax.tree.map(jnp.subtract, slopes[1], bend.across(bend.solve(slopes[0], self.solver_steps)))

    # ---------------------------------------------------------------- who computes

    def _blocks(self, problem: Problem) -> Node:
        cosine = self.cosine

        def send(state: _State, ctx: Context) -> PyTree:
            blocks = self._bend(problem, state, ctx).blocks()
            # A real server remembers the round and φ; here it is told.
            slopes = None if problem.outer is no_cost else self._own_slopes(problem, state, ctx)
            return ctx.round, state.hyper, state.params, blocks, slopes

        def compute(messages: PyTree, key: PRNGKeyArray) -> PyTree:
            round, hypers, params, (curvatures, jacobians), slopes = messages
            hyper = jax.tree.map(lambda h: h[0], hypers)
            if slopes is None:
                slopes = jax.tree.map(jnp.zeros_like, (params, hypers))
            along_params, along_hyper = slopes[0], jax.tree.map(lambda s: jnp.sum(s, axis=0), slopes[1])
            if cosine is not None and isinstance(problem, GraphProblem):
                represent, value = jax.vmap(problem.represent, (0, None)), cosine.cost

                def cost(params, hyper):
                    return value(represent(params, hyper), round[0])

                along_params, along_hyper = jax.tree.map(
                    jnp.add, (along_params, along_hyper), jax.grad(cost, argnums=(0, 1))(params, hyper)
                )
            right = jax.vmap(lambda tree: ravel_pytree(tree)[0])(along_params)
            q = jnp.linalg.solve(curvatures, right[..., None])[..., 0]
            flat, restore = ravel_pytree(along_hyper)
            slope = restore(flat - jnp.einsum("nhp,np->h", jacobians, q))
            after = down(hyper, slope, step_at(self.outer_step, round[0]))
            return jax.tree.map(lambda h, like: jnp.broadcast_to(h, like.shape), after, hypers)

        return Server(send, compute, receive=lambda state, hyper, ctx: replace(state, hyper=hyper))

    def _products(self, problem: Problem) -> Node:
        cosine = self.cosine

        def step(state: _State, average: PyTree, ctx: Context) -> _State:
            return replace(state, hyper=down(state.hyper, average, ctx.clients * step_at(self.outer_step, ctx.round)))

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
            rate = ctx.clients * step_at(self.outer_step, ctx.round) / state.mass
            return replace(state, hyper=down(state.hyper, self._part(problem, state, ctx), rate))

        def send(state: _State, ctx: Context) -> PyTree:
            return jax.tree.map(lambda h: state.mass * h, state.hyper), state.mass

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            z, mass = inbox.mix(send(state, ctx))
            return replace(state, hyper=jax.tree.map(lambda z: (z / mass).astype(z.dtype), z), mass=mass)

        push = Exchange(send, receive, conserved=True)
        agree = push if self.rounds == 1 else Repeat(push, self.rounds, name="push-sum")
        if self.cosine is None:
            return Sequence(Local(step), agree)
        return Sequence(*message_passing(self.cosine), Local(step), agree)


def check_clients(cosine: Cosine, clients: int) -> None:
    """Refuse a graph of other clients than those that run."""
    if cosine.graph.clients != clients:
        raise InvalidInput("graph", f"{cosine.graph.clients} clients", f"{clients}, as the network")


def message_passing(cosine: Cosine) -> tuple[Node, Node, Node]:
    """On states with `shown` and `scale`: ∂F/∂p_i in place of p_i, by three exchanges.

    Forward and backward go over the links of the graph. In between everybody shows its H to whoever can be reached: to
    neighbours, which are compared with, and to those who may have drawn it or be drawn. Where only some of those are
    heard who are no neighbours, they stand for all of them.
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
        return no_neighbours(*cosine.graph.at(ctx.round))[ctx.client]

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
