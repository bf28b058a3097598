"""LDP-DSBO on streams of quadratics: how accuracy and privacy budget go on with time (docs/bilevel.md).

Samples arrive one per round and client and are used once. A strongly convex, a convex and a non-convex outer cost, runs
without noise, and with noise that does not fall, beside each other.
"""

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Case = Literal["strongly convex", "convex", "non-convex"]
CASES: tuple[Case, ...] = ("strongly convex", "convex", "non-convex")
SIZE = 2  # numbers in the params, and in the hypers
POINTS = 1000


class Private(Config):
    """Options of the study of private bilevel optimization; steps and noise fall as powers of the round."""

    clients: Annotated[int, Field(ge=3)] = 5
    network: str = Field(default="ring", description="Name of the network; it has to be undirected and static.")
    rounds: Annotated[int, Field(ge=100)] = Field(default=100_000, description="Rounds T, and samples of each client.")
    seeds: Annotated[int, Field(ge=2)] = Field(default=20, description="Runs, each with samples and noise of its own.")
    epsilon: Positive = Field(default=8.0, description="Pure ε that no client exceeds, however long it runs.")
    step: Positive = Field(default=0.05, description="Step at round 0.")
    step_exponent: Positive = Field(default=0.6, description="How fast steps fall.")
    noise_exponent: Positive = Field(default=0.55, description="How fast noise falls.")
    spread: Positive = Field(default=0.5, description="Samples differ from their mean by at most so much.")
    trials: Annotated[int, Field(ge=100)] = Field(default=100_000, description="Runs of the attack.")
    attacked: Count = Field(default=4, description="Rounds that the attack looks at.")
    cases: tuple[Case, ...] = Field(default=CASES, min_length=1, description="Outer costs; curve is that of the first.")
    seed: int = Field(default=0, ge=0, description="Decides the problem, the samples and every draw.")
    precision: Literal["float32", "float64"] = "float64"


class Stream(NamedTuple):
    """Costs whose samples have means b and e; all else is fixed, [clients, …].

    g = ½yᵀA_i y − bᵀy + xᵀC_i y,   f = ½‖D_i y − e‖² + ½μ‖x − t_i‖² + ρ Σ_k cos 3x_k
    """

    hessian: np.ndarray  # A
    coupling: np.ndarray  # C
    map: np.ndarray  # D
    aim: np.ndarray  # t
    linear: np.ndarray  # mean of b
    target: np.ndarray  # mean of e
    pull: float  # μ
    ripple: float  # ρ

    def inner_solution(self, x: np.ndarray) -> np.ndarray:
        """y*(x), for hypers on the last axis."""
        inverse = np.linalg.inv(self.hessian.mean(0))
        return (self.linear.mean(0) - x @ self.coupling.mean(0)) @ inverse

    def cost(self, x: np.ndarray) -> Any:
        """F(x) without the variance of the samples."""
        y = self.inner_solution(x)
        misfit = np.einsum("nij,...j->...ni", self.map, y) - self.target
        away = x[..., None, :] - self.aim
        own = 0.5 * (misfit**2).sum(-1) + 0.5 * self.pull * (away**2).sum(-1)
        return own.mean(-1) + self.ripple * np.cos(3 * x).sum(-1)

    def adjoint(self, x: np.ndarray) -> np.ndarray:
        """z*(x) = H̄^{-1} ∂_y f̄."""
        misfit = np.einsum("nij,...j->...ni", self.map, self.inner_solution(x)) - self.target
        along_y = np.einsum("nij,...ni->...nj", self.map, misfit).mean(-2)
        return along_y @ np.linalg.inv(self.hessian.mean(0))

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """∇F(x)."""
        direct = self.pull * (x - self.aim.mean(0)) - 3 * self.ripple * np.sin(3 * x)
        return direct - self.adjoint(x) @ self.coupling.mean(0).T

    def minimum(self) -> np.ndarray:
        """A minimizer of F if ρ = 0: ∇F is affine."""
        zero = self.gradient(np.zeros(SIZE))
        slope = (self.gradient(np.eye(SIZE)) - zero).T
        return -np.linalg.pinv(slope) @ zero


def stream(case: Case, clients: int, seed: int) -> Stream:
    """Unlike clients. The convex cost does not see one direction of the hypers; the non-convex one has ripples."""
    generator = np.random.default_rng(seed)
    factor = generator.normal(0, 0.3, (clients, SIZE, SIZE))
    coupling = generator.normal(0, 0.3, (clients, SIZE, SIZE)) + np.eye(SIZE)
    if case == "convex":  # the second hyper has no effect on anybody's params
        coupling[:, 1] = 0
    pull = {"strongly convex": 1.0, "convex": 0.0, "non-convex": 0.5}[case]
    return Stream(
        hessian=np.eye(SIZE) + factor @ factor.transpose(0, 2, 1),
        coupling=coupling,
        map=np.eye(SIZE) + generator.normal(0, 0.2, (clients, SIZE, SIZE)),
        aim=generator.normal(0.5, 0.3, (clients, SIZE)),
        linear=generator.normal(0, 0.5, (clients, SIZE)),
        target=generator.normal(0, 0.5, (clients, SIZE)),
        pull=pull,
        ripple=0.15 if case == "non-convex" else 0.0,
    )


def problem_of(made: Stream) -> Any:
    """The costs of rows (client, sample)."""
    import jax.numpy as jnp

    from hyperpush.programs import Problem

    tables = [jnp.asarray(table) for table in made[:4]]

    def inner(y, x, rows):
        hessian, coupling, *_ = (table[rows["client"][0]] for table in tables)
        return 0.5 * y @ hessian @ y - rows["sample"] @ y + x @ coupling @ y

    def outer(y, x, rows):
        *_, mapped, aim = (table[rows["client"][0]] for table in tables)
        misfit = jnp.sum((mapped @ y - rows["sample"]) ** 2, -1)
        return 0.5 * misfit + 0.5 * made.pull * jnp.sum((x - aim) ** 2) + made.ripple * jnp.sum(jnp.cos(3 * x))

    return Problem(inner, outer)


def constants_of(made: Stream, spread: float) -> Any:
    """What holds for every sample: smoothness exactly, clips above what is met at the start and at the end."""
    from hyperpush.privacy.sensitivity import Constants

    def norm(matrices):
        return float(np.linalg.norm(matrices, 2, axis=(-2, -1)).max())

    ends = np.stack([np.zeros(SIZE), made.minimum() if made.ripple == 0 else made.aim.mean(0)])
    y = np.stack([np.zeros(SIZE), made.inner_solution(ends[1])])[:, None]
    slopes = np.einsum("nij,enj->eni", made.hessian, np.broadcast_to(y, (2, len(made.aim), SIZE))) - made.linear
    slopes = slopes + np.einsum("nhd,eh->end", made.coupling, ends)
    misfits = np.einsum("nij,enj->eni", made.map, np.broadcast_to(y, (2, len(made.aim), SIZE))) - made.target
    pulls = np.einsum("nij,eni->enj", made.map, misfits)
    wide = spread * SIZE**0.5
    largest = {
        "C_y": np.linalg.norm(slopes, axis=-1).max() + wide,
        "C_b": np.linalg.norm(pulls, axis=-1).max() + wide * norm(made.map),
        "C_x": made.pull * np.linalg.norm(ends[:, None] - made.aim, axis=-1).max() + 3 * made.ripple * SIZE**0.5,
        "R": np.linalg.norm(made.adjoint(ends), axis=-1).max(),
    }
    return Constants(
        **{name: 1.25 * float(value) + 0.05 for name, value in largest.items()},
        C_H=norm(made.hessian),
        C_J=norm(made.coupling),
        L_H=0.0,
        L_J=0.0,
        L_b=norm(made.map.transpose(0, 2, 1) @ made.map),
        L_fx=made.pull + 9 * made.ripple,
    )


def samples(made: Stream, rounds: int, spread: float, key: Any) -> Any:
    """Every client's inner and outer rows."""
    import jax
    import jax.numpy as jnp

    from hyperpush.programs import Data

    clients = len(made.aim)
    who = jnp.broadcast_to(jnp.arange(clients, dtype=jnp.int8)[:, None], (clients, rounds))
    parts = []
    for mean, own in zip((made.linear, made.target), jax.random.split(key), strict=True):
        noise = jax.random.uniform(own, (clients, rounds, SIZE), minval=-spread, maxval=spread)
        parts.append({"client": who, "sample": jnp.asarray(mean)[:, None] + noise})
    return Data.pair(*parts)


def errors(made: Stream, case: Case, hypers: np.ndarray) -> np.ndarray:
    """Mean over clients of ‖x − x*‖²; or, of rounds so far as well, of F(x) − F(x*) or ‖∇F(x)‖²; rounds on axis −3."""
    if case == "strongly convex":
        return ((hypers - made.minimum()) ** 2).sum(-1).mean(-1)
    if case == "convex":
        found = (made.cost(hypers) - made.cost(made.minimum())).mean(-1)
    else:
        found = (made.gradient(hypers) ** 2).sum(-1).mean(-1)
    return np.cumsum(found, axis=-1) / np.arange(1, found.shape[-1] + 1)


def run_private(config: Private, run: Any) -> dict[str, Any]:
    """Budgets, the attack, and error curves."""
    import jax

    from hyperpush import networks
    from hyperpush.algorithms.ldp_dsbo import LDPDSBO
    from hyperpush.optimizers import Power
    from hyperpush.privacy import ASSUMPTION
    from hyperpush.privacy.mechanisms import Laplace

    network = networks.by_name(config.network, config.clients, config.seed)
    steps, start = Power(config.step, config.step_exponent), np.zeros((config.clients, SIZE))
    marks = np.unique(np.geomspace(100, config.rounds, 25).astype(int))
    result: dict[str, Any] = {"assumes": ASSUMPTION}
    curves: list[dict[str, Any]] = []

    def algorithm(constants, noise, rounds=config.rounds, checked=True):
        return LDPDSBO(rounds, steps, noise, constants, "once", checked=checked)

    with run.progress("runs", len(config.cases) + 3) as bar:
        for case in config.cases:
            made = stream(case, config.clients, config.seed)
            constants = constants_of(made, config.spread)
            unscaled = algorithm(constants, Laplace(Power(1.0, config.noise_exponent)))
            noise = unscaled.accountant(network, start, start).noise_for(config.epsilon)
            runs = {"falling noise": algorithm(constants, noise)}
            if case == config.cases[0]:
                still = {name: Laplace(Power(mechanism.scale.scale)) for name, mechanism in noise.items()}
                runs["constant noise"] = algorithm(constants, still, checked=False)
                runs["no noise"] = algorithm(constants, None)
                account = runs["falling noise"].accountant(network, start, start)
                spent = np.asarray(account.epsilon_by_round(config.rounds)).max(-1)
                result["epsilon_claimed"] = float(spent[-1])
                # The tail that the limit adds can be smaller than rounding.
                result["epsilon_limit"] = max(float(account.limit().max()), result["epsilon_claimed"])
                early = np.unique(np.geomspace(1, config.rounds, 40).astype(int))
                result["epsilon_by_round"] = {"T": early.tolist(), "epsilon": spent[early - 1].tolist()}
                growing = runs["constant noise"].accountant(network, start, start)
                result["epsilon_constant_noise"] = float(np.asarray(growing.epsilon_by_round(config.rounds)[-1]).max())
                result["noise_scale"] = noise["y"].scale.scale
                first = algorithm(constants, noise, rounds=config.attacked + 1)
                found = attack(config, made, first, network)
                result["epsilon_audited"] = found.lower
                # What the attacked rounds alone may cost: the most that it could have found.
                result["epsilon_attacked_rounds"] = float(
                    np.asarray(account.epsilon_by_round(config.attacked + 1)[-1]).max()
                )
                bar.advance()
            for name, each in runs.items():
                key = jax.random.key(config.seed)
                seen = hypers_by_round(config, made, each, network, key)  # seeds × points × clients × size
                every = max(1, config.rounds // POINTS)
                places = np.maximum(marks // every, 1) - 1
                found = errors(made, case, seen)
                curve = {
                    "case": case,
                    "noise": name,
                    "T": ((places + 1) * every).tolist(),
                    "distance": found.mean(0)[places].tolist(),
                    "distance_std": found.std(0, ddof=1)[places].tolist(),
                    "slope": slope(np.arange(1, found.shape[1] + 1) * every, found.mean(0)),
                }
                run.record(**curve)
                curves.append(curve)
                bar.advance()
    result["curve"] = {key: curves[0][key] for key in ("T", "distance", "slope")}
    result["curves"] = curves
    _report(run, result)
    return result


def slope(rounds: np.ndarray, values: np.ndarray) -> float:
    """Of log error over log T in the last decade."""
    last = rounds >= rounds[-1] / 10
    return float(np.polyfit(np.log(rounds[last]), np.log(values[last]), 1)[0])


def hypers_by_round(config: Private, made: Stream, algorithm: Any, network: Any, key: Any) -> np.ndarray:
    """The hypers of every client at `POINTS` rounds, for every seed."""
    import jax
    import jax.numpy as jnp

    from hyperpush.algorithms.base import LOOP
    from hyperpush.programs import BilevelState, evaluate, program_of

    recipe, every = program_of(algorithm, problem_of(made)), max(1, config.rounds // POINTS)
    start = jnp.zeros((config.clients, SIZE))

    def one(key):
        drawing, running = jax.random.split(key)
        data = samples(made, config.rounds, config.spread, drawing)
        record = {LOOP: lambda state, ctx: state.hyper}
        return evaluate(recipe, network, BilevelState(start, start), data, running, record=record, every=every)[1][LOOP]

    seen = jax.jit(lambda keys: jax.vmap(one)(keys))(jax.random.split(key, config.seeds))
    return np.asarray(seen, np.float64)


def attack(config: Private, made: Stream, algorithm: Any, network: Any) -> Any:
    """Tell two values of client 0's first sample apart by its first noisy messages.

    The two are far apart along (1, 1), where clipping makes the most of Laplace noise. All clients' messages follow
    from what all hear; subtracting what client 0 heard leaves what its own samples did.
    """
    from functools import partial

    import jax
    import jax.numpy as jnp

    from hyperpush.algorithms.base import LOOP
    from hyperpush.networks import matrix
    from hyperpush.privacy.audit import audit
    from hyperpush.programs import BilevelState, Data, Exchange, Inbox, Repeat, Scope, evaluate

    problem, rounds = problem_of(made), algorithm.steps
    plain: Any = algorithm.program(problem)
    exchange = plain.body.body

    def listen(state, inbox: Inbox, ctx):
        held, _ = state
        after = exchange.receive(held, inbox, ctx)
        return after, jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(inbox.total)])

    listening = Exchange(lambda state, ctx: exchange.send(state[0], ctx), listen, weights="gossip")
    program = Scope(
        Repeat(listening, rounds, name=LOOP),
        enter=lambda state, ctx: (plain.enter(state, ctx), jnp.zeros(3 * SIZE)),
        leave=lambda before, state, ctx: before,
    )
    weights = np.asarray(matrix(network, jax.random.key(0), 0, "gossip"), np.float64)
    away = np.linalg.pinv(weights - np.diag(np.diag(weights)))[0]
    keep, start = weights[0, 0], jnp.zeros((network.clients, SIZE))
    usual = samples(made, rounds, config.spread, jax.random.key(config.seed))

    @jax.jit
    def observed(sign, keys):
        def first(rows):
            return {**rows, "sample": rows["sample"].at[0, 0].set(sign * 1e3)}

        data = Data.pair(first(usual.train), first(usual.outer))

        def one(key):
            record = {LOOP: lambda state, ctx: state[1]}
            heard = evaluate(program, network, BilevelState(start, start), data, key, record=record)[1][LOOP]
            messages, from_others, left = jnp.tensordot(heard, away, ((1,), (0,))), jnp.zeros(3 * SIZE), []
            for t in range(rounds):
                left.append(messages[t] - from_others)
                from_others = keep * from_others + heard[t, 0]
            return jnp.concatenate(left[1:])

        return jax.vmap(one)(keys)

    runs = partial(observed, 1.0), partial(observed, -1.0)
    return audit(*runs, config.trials, seed=config.seed, chunk=50_000)


def _report(run: Any, result: dict[str, Any]) -> None:
    """A table, and the curves."""
    from hyperpush.runs.report.figures import Curve, error_curves, panels

    rows = [
        (curve["case"], curve["noise"], curve["distance"][0], curve["distance"][-1], curve["slope"])
        for curve in result["curves"]
    ]
    first, last = result["curve"]["T"][0], result["curve"]["T"][-1]
    run.table("error", ("outer cost", "noise", f"T = {first}", f"T = {last}", "slope at the end"), rows)
    names = ("epsilon_claimed", "epsilon_limit", "epsilon_audited", "epsilon_constant_noise")
    run.table("privacy", ("quantity", "ε"), [(name, result[name]) for name in names])
    run.console.print(result["assumes"], highlight=False)
    figure, axes = panels(2)
    drawn = [Curve(f"{c['case']}, {c['noise']}", c["T"], c["distance"]) for c in result["curves"]]
    error_curves(axes[0], drawn, x_label="rounds T", y_label="error, mean over seeds", log_x=True)
    axes[0].legend(fontsize=5)
    budget = result["epsilon_by_round"]
    limit = Curve("limit", budget["T"], [result["epsilon_limit"]] * len(budget["T"]))
    spent = Curve("spent", budget["T"][1:], budget["epsilon"][1:])  # nothing in the first round
    error_curves(axes[1], [spent, limit], x_label="rounds T", y_label="ε", log_x=True)
    run.figure("private", figure)


EXPERIMENT = Experiment(
    "private",
    "LDP-DSBO on streams: accuracy that improves for ever at a finite privacy budget.",
    Private,
    run_private,
)
