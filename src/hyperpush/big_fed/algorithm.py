"""BiG-Fed: local models on a graph, and a shared kernel that is learned from their similarities."""

from dataclasses import replace
from typing import Any, ClassVar, Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from hyperpush.algorithms.base import BilevelState, TwoLevelDescent, descend
from hyperpush.algorithms.pooled import mean
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.numbers import as_number
from hyperpush.base.ranges import Count, NonNegative, OptionalCount
from hyperpush.big_fed.cosine import Cosine, find_strangers, pair_cost
from hyperpush.big_fed.curvature import Curvature, DampedCurvature
from hyperpush.big_fed.strangers import check_strangers
from hyperpush.data.batches import minibatch
from hyperpush.methods.base import MethodInfo, NetworkKind
from hyperpush.networks import Network
from hyperpush.programs import Context, Exchange, Inbox, Local, Node, Repeat, Sequence, Server
from hyperpush.task.problem import JointCost, ModelLoss, Problem

# Network that each form requires, and the messages of its clients.
FORMS: dict[str, tuple[NetworkKind, str]] = {
    "products": ("server", "shown vectors (may reveal params), the client's part of the hypergradient"),
    "peers": ("any", "shown vectors (may reveal params) to all clients in reach, and the hypers"),
}


class _InfoByForm:
    """Descriptor of `BiGFed.info`, which depends on the algorithm's form; the class shows that of the default form."""

    def __get__(self, algorithm: "BiGFed | None", owner: type) -> MethodInfo:
        form = "products" if algorithm is None else algorithm.form
        network, sends = FORMS[form]
        return MethodInfo(
            network=network,
            target="local",
            sends=sends,
            paper="Xing, Lu, Wu and Yu, BiG-Fed: bilevel optimization enhanced graph-aided federated learning, 2021",
            note="one outer cost of all clients' own inner solutions",
            fixed_point="x_L",
            example={"steps": 3, "outer_step_size": 0.05, "inner_step_size": 0.1, "curvature": "hessian"},
            lossy=form == "peers",
            joint=True,
        )


class _OuterCost:
    """One client's parts of the outer cost F: the cost of the graph, and its own outer cost if it has one."""

    def __init__(self, problem: Problem):
        cost = problem.outer
        self.problem = problem
        self.cosine = cost if isinstance(cost, Cosine) else None
        self.own: Problem | None = problem  # with the clients' own outer costs only
        if isinstance(cost, JointCost):
            has_own = cost.own is not None or problem.outer_penalty is not None
            # Without an own cost, only a penalty counts.
            self.own = replace(problem, outer=cost.own or (lambda *_: jnp.zeros(()))) if has_own else None

    def show(self, params: PyTree, hyper: PyTree) -> Float[Array, " d"]:
        """Return p, the vector that a client shows of its model; without a graph, a single zero."""
        cosine = self.cosine
        return jnp.zeros((1,)) if cosine is None else cosine.represent(self.problem.whole(params), hyper)

    def presence(self, ctx: Context) -> tuple[Bool[Array, ""], Int[Array, ""]]:
        """Return True if the client takes part in this round, and the number of such clients."""
        if self.cosine is None:
            return jnp.ones((), bool), jnp.asarray(ctx.clients)
        here = self.cosine.graph.at(ctx.round)[1]
        return here[ctx.client], jnp.sum(here)


class _State(eqx.Module):
    params: PyTree
    hyper: PyTree
    origin: PyTree  # params at which the blocks C_i and J_i are evaluated
    shown: Float[Array, " d"]  # p_i, then H_i, then the returned ∂F/∂H_i and ∂F/∂p_i
    part: PyTree  # the client's part of dF/dφ; None without personal hypers
    scale: Float[Array, ""]  # l_i of the message passing
    mass: Float[Array, ""]  # ω, the push-sum weight; 1 with a server


@final
class BiGFed(TwoLevelDescent):
    """Bilevel optimization enhanced graph-aided federated learning: local models and a shared kernel.

    Each client has its own params θ_i; the hyper φ is common. Each client shows a vector p_i of its model. The task's
    outer cost F is a `Cosine` of these vectors, or the mean of the clients' own outer costs, or the sum of both.

    Client i has the blocks C_i, the curvature of its inner cost g_i, and J_i = ∂²_φθ g_i. Iteration k is (Xing, Lu, Wu
    and Yu 2021, algorithm 1)

        θ_i⁺ = θ_i − β_k ∂_θ g_i(φ, θ_i)
        φ⁺ = φ − α_k Σ_i (∂_φF − J_i (C_i + εI)⁻¹ ∂_{θ_i}F)(φ, θ⁺)

    The inner costs are independent, so their Hessian has only these blocks. They are evaluated at θ_i before the step.
    Entries of φ in `personal` stay local. Those of client i move along n times the i-th term of the sum, for n clients.

    `form` decides who computes what. `"products"`: clients send p_i, the server answers with ∂F/∂p_i, and each client
    solves with its own block by conjugate gradients. `"peers"`: without a server, vectors p travel over the links of
    the graph, and H = Mp to all clients in reach. Each client draws negative samples among the clients that it heard.
    ∂F/∂H returns over the links of the graph, and clients average φ by push-sum.

    **Use it** if clients are nodes of a graph whose neighbors should have similar models. **Avoid it** if params are
    secret. If φ can be inverted, shown vectors reveal θ_i to the server of "products" and to all clients that "peers"
    reach. A peer that hears only neighbors is attracted to them, but gets no negative samples. `hp.solve` warns of such
    clients, and refuses a network where all clients are so.

    Departures from the paper:

    1. In the paper clients send θ_i, C_i and J_i to a server, which computes the same. "peers" and Gauss–Newton blocks
       are new here.
    2. If links change, "peers" return gradients over other links than the vectors came by, which is a heuristic.

    Args:
        steps: Number of iterations, 0 or more. With 0 only φ is averaged.
        outer_step_size: α, above 0; a number or a schedule by iteration. TTSA's choice falls like k^−3/5.
        inner_step_size: β, above 0; a number or a schedule by iteration. TTSA's choice falls like k^−2/5.
        form: `"products"` or `"peers"`.
        curvature: C: `"hessian"`, or `"gauss-newton"`, its positive semidefinite part, which needs a task whose
            inner cost is a pair (model, loss).
        damping: ε, 0 or more. Larger values are safer, and bias the hypergradient towards ∂_φF.
        inner_steps: Steps on θ per iteration, at least 1. With several steps, choose `blocks_at="after"`.
        blocks_at: Evaluate the blocks at the params `"before"` or `"after"` the steps on θ.
        batch_size: Training examples per step, drawn anew each time; None uses all.
        solver_steps: Steps of conjugate gradients, at least 1.
        pushes: Rounds of push-sum on φ per iteration of "peers", at least 1.
        personal: Names of entries of the hypers that stay local, such as `("mtl",)` of a recipe beside a kernel. They
            are never sent. A solution's `hypers` hold them; its `hyper` is the clients' mean.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        Two pairs of neighbors: each client fits its own slopes φ·θ_i, with a common φ.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> pairs = jnp.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
        >>> look = hp.big_fed.Cosine(hp.networks.Graph(pairs), represent=lambda slope, phi: phi * slope)
        >>> inputs, slopes = jnp.ones((4, 3, 2)), jnp.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> task = hp.Task(
        ...     inner=lambda slope, phi, batch: ((batch[0] * (phi * slope - batch[1])) ** 2).sum(-1), outer=look,
        ...     params=jnp.ones(2), hypers=jnp.ones(2), common=True,
        ...     train=(inputs, jnp.repeat(slopes[:, None], 3, 1)),
        ... )
        >>> method = hp.big_fed.BiGFed(30, 0.05, 0.1, curvature="hessian")
        >>> found = hp.solve(task, method, hp.networks.FullyConnected(4), key=0)
        >>> bool(abs(found.hyper * found.params - slopes).max() < 0.01)
        True
    """

    info: ClassVar[MethodInfo] = _InfoByForm()  # pyright: ignore[reportAssignmentType]

    form: Literal["products", "peers"] = eqx.field(static=True, default="products")
    curvature: Curvature = eqx.field(static=True, default="gauss-newton")
    damping: NonNegative = eqx.field(converter=as_number, default=0.1)
    inner_steps: Count = eqx.field(static=True, default=1)
    blocks_at: Literal["before", "after"] = eqx.field(static=True, default="before")
    batch_size: OptionalCount = eqx.field(static=True, default=None)
    solver_steps: Count = eqx.field(static=True, default=20)
    pushes: Count = eqx.field(static=True, default=1)
    personal: tuple[str, ...] = eqx.field(static=True, default=(), converter=tuple)

    def check(self, task: Any, network: Network | None = None) -> None:
        """Raise `InvalidInput` for joint costs other than `Cosine`, and for a curvature or network that does not fit.

        Gauss–Newton requires an inner cost in two parts (model, loss). The network must fit the graph.
        """
        super().check(task, network)
        if task.joint and not isinstance(task.outer, Cosine):
            raise InvalidInput("task.outer", type(task.outer).__name__, "hp.big_fed.Cosine(…), or a client's own cost")
        if self.curvature == "gauss-newton" and not isinstance(task.problem.inner, ModelLoss):
            allowed = "'hessian', or a task with inner=(model, loss), whose parts Gauss–Newton needs"
            raise InvalidInput("BiGFed.curvature", self.curvature, allowed)
        for name in self.personal:
            if not isinstance(task.hypers, dict) or name not in task.hypers:
                raise unknown("BiGFed.personal", name, task.hypers if isinstance(task.hypers, dict) else ())
        if network is not None:
            self._check_network(network, task)

    def _common(self, tree: PyTree) -> PyTree:
        """Return the entries outside of `personal` of a tree with the structure of the hypers."""
        return {name: each for name, each in tree.items() if name not in self.personal} if self.personal else tree

    def _with_common(self, tree: PyTree, common: PyTree) -> PyTree:
        """Return a tree with the structure of the hypers, with its entries outside of `personal` replaced."""
        return {**tree, **common} if self.personal else common

    def _check_network(self, network: Network, task: Any) -> None:
        """Raise `InvalidInput` for a network of another size than the graph, or without negative samples for peers."""
        cosine = task.outer
        if isinstance(cosine, Cosine):
            if cosine.graph.clients != network.clients:
                raise InvalidInput("graph", f"{cosine.graph.clients} clients", f"{network.clients}, as the network")
            if self.form == "peers":
                check_strangers(cosine, network, self.steps, stride=self.exchanges)

    @property
    def exchanges(self) -> int:
        """Number of exchanges in an iteration of "peers": three to pass messages, then the pushes."""
        return 3 + self.pushes

    def program(self, problem: Problem) -> Node:
        outer = _OuterCost(problem)

        def enter(state: BilevelState, ctx: Context) -> _State:
            shown, one = outer.show(state.params, state.hyper), jnp.ones(())
            part = state.hyper if self.personal else None
            return _State(state.params, state.hyper, state.params, shown, part, one, one)

        def train(state: _State, ctx: Context) -> _State:
            def step(number, params):
                batch = minibatch(ctx.data.train, self.batch_size, jax.random.fold_in(ctx.key, number))
                return descend(params, problem.inner_gradient(params, state.hyper, batch), self.rates(ctx.round)[1])

            trained = jax.lax.fori_loop(0, self.inner_steps, step, state.params)
            params = optax.tree.where(outer.presence(ctx)[0], trained, state.params)
            origin = state.params if self.blocks_at == "before" else params
            return replace(state, params=params, origin=origin, shown=outer.show(params, state.hyper))

        agree = mean(
            lambda state, ctx: self._common(state.hyper),
            lambda state, common, ctx: replace(state, hyper=self._with_common(state.hyper, common)),
        )
        start = Sequence() if self.form == "peers" else agree
        improve = (self._peers if self.form == "peers" else self._products)(outer)
        return self.iterate(Sequence(Local(train), improve), enter, start)

    # ---------------------------------------------------------------- one client's parts

    def _damped_curvature(self, outer: _OuterCost, state: _State, ctx: Context) -> DampedCurvature:
        batch = minibatch(ctx.data.train, self.batch_size, ctx.key)
        return DampedCurvature(outer.problem, self.curvature, self.damping, state.origin, state.hyper, batch)

    def _own_gradients(self, outer: _OuterCost, state: _State, ctx: Context) -> tuple[PyTree, PyTree]:
        """Return the gradients, by θ_i and φ, of this client's own outer cost divided by the number of clients.

        They are zero without own outer costs.
        """
        if outer.own is None:
            return optax.tree.zeros_like((state.params, state.hyper))
        here, count = outer.presence(ctx)
        batch = minibatch(ctx.data.outer, self.batch_size, jax.random.fold_in(ctx.key, 1))
        gradients = outer.own.outer_gradients(state.params, state.hyper, batch)
        return jax.tree.map(lambda g: jnp.where(here, g, 0) / count, gradients)

    def _part(self, outer: _OuterCost, state: _State, ctx: Context) -> PyTree:
        """Return the client's part of dF/dφ, from ∂F/∂p_i in `shown`; the parts of all clients sum to dF/dφ."""
        gradients = self._own_gradients(outer, state, ctx)
        if outer.cosine is not None:
            _, pull_back = jax.vjp(outer.show, state.params, state.hyper)
            gradients = optax.tree.add(gradients, pull_back(state.shown))
        curvature = self._damped_curvature(outer, state, ctx)
        return optax.tree.sub(gradients[1], curvature.across(curvature.solve(gradients[0], self.solver_steps)))

    # ---------------------------------------------------------------- the two forms

    def _products(self, outer: _OuterCost) -> Node:
        cosine = outer.cosine

        def step(state: _State, common: PyTree, ctx: Context) -> _State:
            slope = self._with_common(state.part, common)
            return replace(state, hyper=descend(state.hyper, slope, ctx.clients * self.rates(ctx.round)[0]))

        def keep_part(state: _State, ctx: Context) -> _State:
            return replace(state, part=self._part(outer, state, ctx))

        improve: Node = mean(lambda state, ctx: self._part(outer, state, ctx), step)
        if self.personal:
            improve = Sequence(Local(keep_part), mean(lambda state, ctx: self._common(state.part), step))
        if cosine is None:
            return improve

        def slopes(messages: PyTree, key: PRNGKeyArray) -> Float[Array, "n d"]:
            rounds, shown = messages
            return jax.grad(cosine.cost)(shown, rounds[0])

        ask = Server(
            send=lambda state, ctx: (ctx.round, state.shown),
            compute=slopes,
            receive=lambda state, slope, ctx: replace(state, shown=slope),
        )
        return Sequence(ask, improve)

    def _peers(self, outer: _OuterCost) -> Node:
        def step(state: _State, ctx: Context) -> _State:
            rate, part = ctx.clients * self.rates(ctx.round)[0], self._part(outer, state, ctx)
            slope = self._with_common(part, optax.tree.scale(1 / state.mass, self._common(part)))
            return replace(state, hyper=descend(state.hyper, slope, rate))

        def send(state: _State, ctx: Context) -> PyTree:
            return optax.tree.scale(state.mass, self._common(state.hyper)), state.mass

        def receive(state: _State, inbox: Inbox, ctx: Context) -> _State:
            z, mass = inbox.mix(send(state, ctx))
            common = jax.tree.map(lambda z: (z / mass).astype(z.dtype), z)
            return replace(state, hyper=self._with_common(state.hyper, common), mass=mass)

        push = Exchange(send, receive, conserved=True)
        agree = push if self.pushes == 1 else Repeat(push, self.pushes, name="push-sum")
        passing = () if outer.cosine is None else message_passing(outer.cosine)
        return Sequence(*passing, Local(step), agree)


def message_passing(cosine: Cosine) -> tuple[Node, Node, Node]:
    """Return three exchanges that replace p_i by ∂F/∂p_i in the field `shown` of the clients' states.

    Forward and backward messages use the links of the graph. In between, each client sends its H to all clients in
    reach: to neighbors, for comparison, and to possible negative samples. Strangers are clients that are not neighbors.
    If a client hears only some of its strangers, these represent all of them.
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
        mine = cosine.self_loops * scaled_representation(state, ctx)
        return replace(state, shown=left * (mine + inbox.total), scale=left)

    def scaled_representation(state: Any, ctx: Context) -> Float[Array, " d"]:
        return cosine.scales(jnp.sum(row(ctx)))[1] * state.shown

    def rate(ctx: Context) -> Float[Array, ""]:
        return cosine.rate(row(ctx), jnp.sum(strangers(ctx)))

    def strangers(ctx: Context) -> Array:
        return find_strangers(*cosine.graph.at(ctx.round))[ctx.client]

    def compare(state: Any, inbox: Inbox, ctx: Context) -> Any:
        assert inbox.heard is not None
        others, rates = inbox.total
        chance, far = cosine.uniform(ctx.round), strangers(ctx)
        mine, theirs = rate(ctx) + chance[ctx.client], rates + chance[:, ctx.client]
        near = far & inbox.heard
        scale = jnp.sum(far) / jnp.maximum(jnp.sum(near), 1)
        counts = scale * near * (jnp.floor(mine) + jnp.floor(theirs))
        # Each pair counts twice in F, once from each end.
        slope = jax.grad(pair_cost)(state.shown, others, 2 * row(ctx) * inbox.heard, counts)
        return replace(state, shown=slope / jnp.sum(cosine.graph.at(ctx.round)[1]))

    def backward(state: Any, inbox: Inbox, ctx: Context) -> Any:
        _, right = cosine.scales(jnp.sum(row(ctx)))
        mine = cosine.self_loops * state.scale * state.shown
        return replace(state, shown=right * (mine + inbox.total))

    return (
        Exchange(scaled_representation, forward, weights, observe=True),
        Exchange(lambda state, ctx: (state.shown, rate(ctx)), compare, "ones", "stack", observe=True),
        Exchange(lambda state, ctx: state.scale * state.shown, backward, weights),
    )
