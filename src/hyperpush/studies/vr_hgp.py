"""How far VR-HGP is from its target by round and by its weights (α, β), beside what theory says.

The counterpart of figures 1 and 2 and of theorem 1 of "Personalized decentralized bilevel optimization over stochastic
and directed networks"; docs/vr-hgp.md explains what is computed.
"""

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Contraction = Annotated[float, Field(gt=0, lt=1)]
# Where the best weights are looked for.
GRID = np.array(
    [
        (alpha, beta)
        for alpha in (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
        for beta in (0.003, 0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1)
    ]
)


class VRStudy(Config):
    """Options of the study; the defaults are the paper's setting as far as it is told."""

    clients: int = Field(default=3, ge=2, description="Number of clients.")
    data: Literal["auto", "mnist", "digits"] = Field(
        default="auto",
        description="Images: MNIST in $HYPERPUSH_DATA/mnist, scikit-learn's digits; auto: what is there.",
    )
    examples: Count = Field(
        default=100, description="Training examples per client, and as many for validation; fewer if images run out."
    )
    hyper: float = Field(default=0.1, gt=0, description="Every client's L2 rate on each parameter.")
    network: Literal["random-undirected", "random-directed"] = Field(
        default="random-undirected", description="Whether both directions of a link are up together."
    )
    probability: tuple[Share, Share] = Field(
        default=(0.4, 0.8), description="Range from which each link's probability of being up is drawn."
    )
    inner_steps: Count = Field(default=500, description="Steps of stochastic gradient push to the inner solution.")
    step: float = Field(default=0.5, gt=0, description="Its rate, which is also the step of the estimator.")
    rounds: Count = Field(default=500, description="Rounds M of the estimator.")
    weights: tuple[tuple[Share, Share], ...] = Field(
        default=((1.0, 0.0), (0.9, 0.1), (0.5, 0.5), (0.9, 0.9), (0.9, 0.01), (0.99, 0.1), (0.99, 0.01)),
        min_length=1,
        description="Pairs (α, β); (1, 0) is plain directed recurrent backpropagation.",
    )
    runs: int = Field(default=100, ge=2, description="Runs of the estimator on the one problem, with different seeds.")
    contractions: tuple[Contraction, ...] = Field(
        default=(0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99), description="Values of η_A at which μ is tabulated."
    )
    failure: float = Field(default=0.05, gt=0, lt=1, description="Probability with which the bound may fail.")
    seed: int = Field(default=0, ge=0, description="Decides the digits, the data, the network and every draw.")
    precision: Literal["float32", "float64"] = "float32"


def mu(alpha: float, beta: float, eta: float) -> float:
    """Theorem 1's factor μ_{α,β} at contraction η for M → ∞; theorem 10's μ_{1,0} wherever α = 1.

    μ² = 8 (1−α)/(1+α) (1 + (1+αρ)/(1−αρ) β²η²/(1−ρ²)) with ρ = 1−β+βη. At β = 0 only the noise of B is averaged.
    """
    if alpha == 1:
        return float(np.sqrt(8 * (eta**2 + (1 - eta) ** 2) / (1 - eta**2)))
    average = (1 - alpha) / (1 + alpha)
    if beta == 0:
        return float(np.sqrt(8 * (average + eta**2 / (1 - eta**2))))
    rho = 1 - beta + beta * eta
    grown = (1 + alpha * rho) / (1 - alpha * rho) * beta**2 * eta**2 / (1 - rho**2)
    return float(np.sqrt(8 * average * (1 + grown)))


def mu_by_round(alpha: ArrayLike, beta: ArrayLike, eta: ArrayLike, rounds: int) -> Float[np.ndarray, "rounds ..."]:
    """The factor after every round, with the terms that theorem 1 hides in e^{−O(M)}.

    √8 (1−η) times the standard deviation of v, to first order in s, when A = η(1 + sε), B = 1 + sε' and c = 1 are
    numbers and ε, ε' are independent signs: the paper's bounds on norms are equalities there.
    """
    alpha, beta, eta = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (alpha, beta, eta)))
    zero, rest, stay = np.zeros_like(alpha), 1 - alpha, 1 - beta

    def matrices(*rows):
        return np.moveaxis(np.array(rows), (0, 1), (-2, -1))

    onward = matrices((eta, zero, zero), (stay * eta, stay + beta * eta, zero), (alpha, rest, alpha))
    covariance, u, w, found = np.zeros_like(onward), zero + 1, zero + 1, []
    for _ in range(rounds):
        kicks = matrices((eta * u, zero), (eta * (beta * w + stay * u), zero), (zero, alpha * u + rest * w))
        covariance = onward @ covariance @ onward.mT + kicks @ kicks.mT
        u = eta * u
        w = w + u
        found.append(np.sqrt(8 * covariance[..., 2, 2]) * (1 - eta))
    return np.stack(found)


class Linear(NamedTuple):
    """What VR-HGP iterates at a point, with gradient-after SGP, full batches and links that are up independently."""

    push: Float[np.ndarray, "n n"]  # p̄_{i→j}
    heard: Float[np.ndarray, "n n"]  # what i gives a message from j when it arrives: p̄_{i→j}/δ̄_{j→i}
    spread: Float[np.ndarray, "n n n n"]  # [i, k, j, l]: covariance of these weights for j → i and l → k
    bend: Float[np.ndarray, "nd nd"]  # −γH_i/ω_i, block by block
    down: Float[np.ndarray, "nh nd"]  # B̄: −γB_i
    source: Float[np.ndarray, " nd"]  # c_x

    def forward(self) -> Float[np.ndarray, "nd nd"]:
        """Ā."""
        return np.kron(self.push, np.eye(len(self.source) // len(self.push))) + self.bend

    def series(self) -> Float[np.ndarray, " nh"]:
        """B̄(I − Ā)^{-1} c_x: the target without c_λ."""
        return self.down @ np.linalg.solve(np.eye(len(self.source)) - self.forward(), self.source)


def linearise(task: Any, network: Any, step: float) -> Linear:
    """The maps of `hypergradients/recurrent.py` at the task's params as matrices; params and hypers are vectors."""
    import jax
    import jax.numpy as jnp
    from scipy.linalg import block_diag

    problem = task.problem

    def derivatives(x, hyper, own):
        rows = jax.vmap(lambda unit: problem.products(x, hyper, own.train, unit))(jnp.eye(x.size, dtype=x.dtype))
        return *rows, problem.outer_gradients(x, hyper, own.outer)[0]

    found = jax.jit(jax.vmap(derivatives))(task.params, task.hypers, task.data)
    hessian, mixed, along_x = (np.asarray(part, np.float64) for part in found)  # mixed[i] is B_iᵀ
    means, n = network.means(), network.clients
    mass, up = means.stationary(), means.up.T
    heard = np.divide(means.push, up, out=np.zeros((n, n)), where=up > 0)
    i, j = np.nonzero(~np.eye(n, dtype=bool))
    chance, spread = up[i, j] * (1 - up[i, j]), np.zeros((n, n, n, n))
    spread[i, i, j, j] = chance * heard[i, j] ** 2
    if not network.directed:
        spread[i, j, j, i] = chance * heard[i, j] * heard[j, i]
    return Linear(
        means.push,
        heard,
        spread,
        np.asarray(block_diag(*(-step / mass[:, None, None] * hessian))),
        np.asarray(block_diag(*(-step * mixed.mT))),
        (along_x / n / mass[:, None]).ravel(),
    )


def expected_errors(
    system: Linear, weights: Float[np.ndarray, "pairs 2"], rounds: int
) -> Float[np.ndarray, "pairs rounds"]:
    """√E‖v − B̄(I − Ā)^{-1}c_x‖² after every round, exactly.

    With A random and independent from round to round, the second moments of (u, w, v, 1) obey a linear recursion.
    """
    (m, k), n, pairs = system.down.shape, len(system.push), len(weights)
    alpha, beta, one = weights[:, 0, None, None], weights[:, 1, None, None], np.eye(k)
    size, u, w, v = 2 * k + m + 1, slice(0, k), slice(k, 2 * k), slice(2 * k, 2 * k + m)
    onward, both = np.zeros((pairs, size, size)), slice(0, 2 * k)
    # A moves u into u, and βw + (1 − β)u into w.
    moved = np.zeros((pairs, 2 * k, 2 * k))
    moved[:, u, u], moved[:, w, u], moved[:, w, w] = one, (1 - beta) * one, beta * one
    onward[:, both, both] = np.kron(np.eye(2), system.forward()) @ moved
    onward[:, w, w] += (1 - beta) * one
    onward[:, w, -1] = beta[:, 0] * system.source
    onward[:, v, u], onward[:, v, w] = alpha * system.down, (1 - alpha) * system.down
    onward[:, v, v], onward[:, -1, -1] = alpha * np.eye(m), 1
    start = np.concatenate([system.source, system.source, np.zeros(m), [1]])
    moments = np.broadcast_to(np.outer(start, start), onward.shape)
    misfit = np.concatenate([np.zeros((m, 2 * k)), np.eye(m), -system.series()[:, None]], 1)
    found = []
    for _ in range(rounds):
        moving = (moved @ moments[:, both, both] @ moved.mT).reshape(pairs, 2, n, k // n, 2, n, k // n)
        noise = np.einsum("ikjl,pajdble->paidbke", system.spread, moving, optimize=True)
        moments = onward @ moments @ onward.mT
        moments[:, both, both] += noise.reshape(moved.shape)
        found.append(np.einsum("ea,pab,eb->p", misfit, moments, misfit, optimize=True))
    return np.sqrt(np.maximum(np.stack(found, 1), 0))


def theorem(
    system: Linear, weights: Float[np.ndarray, "pairs 2"], rounds: int, failure: float
) -> tuple[Float[np.ndarray, "pairs rounds"] | None, dict[str, float]]:
    """Theorem 1's right-hand side after every round, for every pair of weights, and its constants.

        μ τ √(Σ (p̄/δ̄)² log(n(d_y + d_λ)/ε)) + η_B‖c_x‖η_A^m/(1 − η_A),  τ = η_B‖c_x‖/(κ(1 − η_A)),  κ = Σ p̄/δ̄

    Without mini-batches 4n/b is left out. η_B = 2κ max‖γB_i‖ is the least that assumption 8 allows. η_A is ‖Ā‖₂:
    assumption 8 asks for η_A ≥ 2κ max(1, ‖γH_i/ω_i‖), which is above 1 for any problem. None where ‖Ā‖₂ ≥ 1.
    """
    n, kappa = len(system.push), float(system.heard.sum())
    contraction = float(np.linalg.norm(system.forward(), 2))
    constants = {
        "contraction": contraction,
        "contraction_of_assumption_8": 2 * kappa * max(1.0, float(np.linalg.norm(system.bend, 2))),
        "coupling": 2 * kappa * float(np.linalg.norm(system.down, 2)),
        "source_norm": float(np.linalg.norm(system.source)),
        "kappa": kappa,
        "links": float((system.heard**2).sum()),
        "dimension": len(system.source) + n + len(system.down),  # y is (z, ω)
    }
    if contraction >= 1:
        return None, constants
    whole = constants["coupling"] * constants["source_norm"] / (1 - contraction)
    chance = np.sqrt(constants["links"] * np.log(constants["dimension"] / failure))
    factor = mu_by_round(weights[:, 0], weights[:, 1], contraction, rounds).T
    return factor * whole / kappa * chance + whole * contraction ** np.arange(1, rounds + 1), constants


def two_digits(config: VRStudy) -> tuple[Any, dict[str, Any]]:
    """Logistic regression between two digits on each image's mean grey and a constant, and what was drawn for it."""
    import jax.numpy as jnp

    from hyperpush.errors import InvalidInput
    from hyperpush.studies.data.sources import available, load
    from hyperpush.task import Task
    from hyperpush.tasks.logistic import l2, losses

    name = config.data if config.data != "auto" else "mnist" if available("mnist", "train") else "digits"
    found, generator = load(name, "all" if name == "digits" else "train"), np.random.default_rng(config.seed)
    pair = generator.choice(10, 2, replace=False)
    rows = generator.permutation(np.flatnonzero(np.isin(found.labels, pair)))
    each = min(config.examples, len(rows) // (2 * config.clients))
    if each == 0:
        raise InvalidInput("clients", config.clients, f"at most {len(rows) // 2}, half the images of {pair.tolist()}")
    rows = rows[: 2 * each * config.clients].reshape(config.clients, 2 * each)
    grey = found.inputs[rows].mean(axis=(2, 3), dtype=np.float64)
    grey = (grey - grey[:, :each].mean()) / grey[:, :each].std()
    dtype = jnp.zeros(()).dtype
    inputs = jnp.asarray(np.stack([grey, np.ones_like(grey)], -1), dtype)
    labels = jnp.asarray(found.labels[rows] == pair[1], dtype)
    training, validation = ((inputs[:, part], labels[:, part]) for part in (slice(each), slice(each, None)))
    task = Task(
        inner=losses,
        penalty=l2,
        outer=losses,
        params=jnp.zeros(2, dtype),
        hypers=jnp.full(2, config.hyper, dtype),
        train=training,
        validation=validation,
    )
    return task, {"data": found.name, "digits": pair.tolist(), "examples": each}


def factors(config: VRStudy) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """μ of every pair of weights at every contraction, and the pairs of a grid with the least μ after all rounds."""
    table = [
        {"eta": eta, "alpha": alpha, "beta": beta, "mu": mu(alpha, beta, eta)}
        for eta in config.contractions
        for alpha, beta in config.weights
    ]
    etas = np.asarray(config.contractions)
    plain = mu_by_round(1, 0, etas, config.rounds)[-1]
    last = mu_by_round(GRID[:, 0, None], GRID[:, 1, None], etas, config.rounds)[-1]
    best = [
        {"eta": eta, "alpha": GRID[least, 0], "beta": GRID[least, 1], "mu": column[least], "mu_plain": of_plain}
        for eta, column, least, of_plain in zip(config.contractions, last.T, last.argmin(0), plain, strict=True)
    ]
    return table, best


def run_vr_hgp(config: VRStudy, run: Any) -> dict[str, Any]:
    """Solve the inner problem once, estimate its hyper-gradient many times, compare with the target and the bound."""
    import jax

    import hyperpush as hp
    from hyperpush.hypergradients import oracles
    from hyperpush.studies.common.estimates import recorded

    network = hp.networks.by_name(config.network, config.clients, config.seed, probability=config.probability)
    made, drawn = two_digits(config)
    training_key, estimation_key = jax.random.split(jax.random.key(config.seed))
    solver = hp.SGP(config.inner_steps, config.step, variant="gradient-after")
    at = hp.train(made, solver, network, key=training_key).params
    task = made.at(params=at)

    system = linearise(task, network, config.step)
    radius = float(np.abs(np.linalg.eigvals(system.forward())).max())
    if not radius < 1:
        raise hp.InvalidInput("step", config.step, f"a step at which the series converges (Ā has radius {radius:.4g})")
    # The outer cost does not depend on the hypers: c_λ = 0, and the series is the whole target.
    target = system.series()
    exact = np.asarray(oracles.dense(task.problem, at, task.hypers, task.data)).ravel()

    @jax.jit
    def all_runs(alpha, beta, keys):
        estimator = hp.hypergradients.VRHGP(config.rounds, config.step, alpha, beta, "gradient-after")
        return jax.vmap(lambda key: recorded(task, estimator, network, key, {"VRHGP": value})["VRHGP"])(keys)

    def value(state, ctx):
        return state.back.value

    keys, weights = jax.random.split(estimation_key, config.runs), np.asarray(config.weights)
    expected = expected_errors(system, weights, config.rounds)
    bounds, constants = theorem(system, weights, config.rounds, config.failure)
    curves = []
    with run.progress("estimates", len(weights)) as bar:
        for place, (alpha, beta) in enumerate(config.weights):
            estimates = np.asarray(all_runs(alpha, beta, keys), np.float64).reshape(config.runs, config.rounds, -1)
            errors = np.linalg.norm(estimates - target, axis=2)
            finite = np.all(np.isfinite(errors), axis=0) & np.isfinite(expected[place])
            if not np.all(finite):
                first = int(np.argmin(finite)) + 1
                raise hp.Diverged(f"VRHGP with {_name(alpha, beta)}", first, "a larger step or L2 rate may help")
            curves.append(
                {
                    "alpha": alpha,
                    "beta": beta,
                    "error": errors.mean(0).tolist(),
                    "error_std": errors.std(0, ddof=1).tolist(),
                    "expected_rms": expected[place].tolist(),
                    "bound": None if bounds is None else bounds[place].tolist(),
                }
            )
            run.record(**curves[-1])
            bar.advance()

    last = expected_errors(system, GRID, config.rounds)[:, -1]
    least = int(np.nanargmin(last))
    table, best = factors(config)
    result = {
        **drawn,
        "true_norm": float(np.linalg.norm(target)),
        # How far the target, the derivative of SGP's mean step, is from the hyper-gradient of the consensus solution.
        "target_gap": float(np.linalg.norm(target - exact)),
        "curves": curves,
        "best": {"alpha": GRID[least, 0], "beta": GRID[least, 1], "expected_rms": last[least]},
        "constants": {"radius": radius, **constants},
        "mu": table,
        "best_mu": best,
    }
    run.save_models("inner-solution", at)
    _report(config, run, result)
    return result


def _name(alpha: float, beta: float) -> str:
    return f"α = {alpha:g}, β = {beta:g}"


def _report(config: VRStudy, run: Any, result: dict[str, Any]) -> None:
    """Figures and tables."""
    from hyperpush.runs.report.figures import Curve, error_curves, panels

    curves = result["curves"]
    rounds, etas = np.arange(1, config.rounds + 1), np.linspace(0.01, 0.99, 99)
    figure, axes = panels(2)
    lines = [Curve(_name(*pair), etas, [mu(*pair, eta) for eta in etas]) for pair in config.weights]
    error_curves(axes[0], lines, x_label="contraction η", y_label="factor μ of theorem 1", title="theory")
    by_round: dict[str, Any] = {"x_label": "round m", "y_label": "error of the hyper-gradient", "log_x": True}
    lines = [Curve(_name(curve["alpha"], curve["beta"]), rounds, curve["error"]) for curve in curves]
    error_curves(axes[1], lines, title="measured", **by_round)
    if legend := axes[0].get_legend():  # the same as beside it, and it would cover lines here
        legend.remove()
    run.figure("weights", figure)

    shown = curves[:2]
    figure, axes = panels(len(shown))
    for axis, curve in zip(axes, shown, strict=True):
        lines = [
            Curve("measured", rounds, curve["error"], curve["error_std"]),
            Curve("root mean square, exact", rounds, curve["expected_rms"]),
        ]
        if curve["bound"] is not None:
            lines.append(Curve("theorem 1", rounds, curve["bound"]))
        error_curves(axis, lines, title=_name(curve["alpha"], curve["beta"]), **by_round)
    run.figure("bound", figure)

    wanted = sorted({m for m in (5, 20, 100) if m < config.rounds} | {config.rounds})

    def row(curve: dict[str, Any]) -> tuple[Any, ...]:
        bound = curve["bound"] and f"{curve['bound'][-1]:.1e}"
        errors = (f"{each:.1e}" for each in (*(curve["error"][m - 1] for m in wanted), curve["expected_rms"][-1]))
        return curve["alpha"], curve["beta"], *errors, bound

    run.table(
        f"error on {result['data']}, mean of {config.runs} runs; true norm {result['true_norm']:.4g}",
        ("α", "β", *(f"round {m}" for m in wanted), "exact rms", "theorem 1"),
        [row(curve) for curve in curves],
    )
    run.table(
        f"weights of least μ after {config.rounds} rounds",
        ("η", "α", "β", "μ", "μ of (1, 0)"),
        [tuple(each.values()) for each in result["best_mu"]],
    )


EXPERIMENT = Experiment(
    "vr-hgp", "Error of variance-reduced hyper-gradients by their weights, and theory.", VRStudy, run_vr_hgp
)
