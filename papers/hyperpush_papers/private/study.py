"""Measure privacy budgets, the bound on ε by an attack, and error curves of LDP-DSBO."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import hyperpush as hp
from hyperpush.algorithms.base import LOOP, BilevelState
from hyperpush.algorithms.ldp_dsbo import LDPDSBO
from hyperpush.base.figures import Curve, error_curves, panels
from hyperpush.data.batches import Data
from hyperpush.engines.simulate import evaluate
from hyperpush.networks import Network, matrix
from hyperpush.privacy import ASSUMPTION
from hyperpush.privacy.accountant import Accountant
from hyperpush.privacy.epsilon_audit import Audit, audit_epsilon
from hyperpush.privacy.mechanisms import Laplace
from hyperpush.privacy.sensitivity import Constants
from hyperpush.programs import Exchange, Inbox, Repeat, Scope, program_of
from hyperpush.runs.run import StudyRun
from hyperpush_papers.private.config import Case, Private
from hyperpush_papers.private.streams import SIZE, Stream, constants_of, errors, problem_of, samples, slope, stream

POINTS = 1000
power = partial(hp.schedule, "power")


def run(config: Private, run: StudyRun) -> dict[str, Any]:
    """Run every case with falling noise; the first also with constant and without noise, its budget and the attack."""
    network = hp.network(config.network, config.clients, config.seed)
    result: dict[str, Any] = {"assumes": ASSUMPTION}
    curves: list[dict[str, Any]] = []
    with run.progress("runs", len(config.cases) + 3) as bar:
        for case in config.cases:
            made = stream(case, config.clients, config.seed)
            constants = constants_of(made, config.spread)
            method = partial(algorithm, config, constants)
            noise = account(method(Laplace(power(1.0, config.noise_exponent))), network).noise_for(config.epsilon)
            runs = {"falling noise": method(noise)}
            if case == config.cases[0]:
                still = {name: Laplace(power(mechanism.scale.scale)) for name, mechanism in noise.items()}
                runs |= {"constant noise": method(still, checked=False), "no noise": method(None)}
                attacked = attack(config, made, method(noise, rounds=config.attacked + 1), network)
                result |= {"epsilon_audited": attacked.lower, "noise_scale": noise["y"].scale.scale}
                result |= budgets(config, runs["falling noise"], runs["constant noise"], network)
                bar.step()
            for name, each in runs.items():
                curves.append({"case": case, "noise": name, **curve_of(config, made, case, each, network)})
                run.record(**curves[-1])
                bar.step()
    result["curve"] = {key: curves[0][key] for key in ("T", "distance", "slope")}
    result["curves"] = curves
    report(run, result)
    return result


def algorithm(
    config: Private, constants: Constants, noise: Any, rounds: int | None = None, checked: bool = True
) -> LDPDSBO:
    """Return LDP-DSBO with this noise, for samples that are used once."""
    steps = power(config.step, config.step_exponent)
    return LDPDSBO(config.rounds if rounds is None else rounds, steps, noise, constants, "once", checked=checked)


def account(method: LDPDSBO, network: Network) -> Accountant:
    """Return the accountant of a method on a network."""
    start = np.zeros((network.clients, SIZE))
    return method.accountant(network, start, start)


def budgets(config: Private, falling: LDPDSBO, constant: LDPDSBO, network: Network) -> dict[str, Any]:
    """Return the largest client's ε: by round, in the limit, for the attacked messages, and with constant noise."""
    own, early = account(falling, network), np.unique(np.geomspace(1, config.rounds, 40).astype(int))
    spent = np.asarray(own.epsilon_by_round(config.rounds)).max(-1)
    return {
        "epsilon_claimed": float(spent[-1]),
        # The limit adds a bound for all later rounds, which can be smaller than rounding errors.
        "epsilon_limit": max(float(own.limit().max()), float(spent[-1])),
        "epsilon_by_round": {"T": early.tolist(), "epsilon": spent[early - 1].tolist()},
        "epsilon_constant_noise": float(
            np.asarray(account(constant, network).epsilon_by_round(config.rounds)[-1]).max()
        ),
        # The largest ε that the attack could have found.
        "epsilon_attacked_rounds": float(np.asarray(own.epsilon_by_round(config.attacked + 1)[-1]).max()),
    }


def curve_of(config: Private, made: Stream, case: Case, method: LDPDSBO, network: Network) -> dict[str, Any]:
    """Return the error by round, averaged over seeds."""
    every = max(1, config.rounds // POINTS)
    marks = np.unique(np.geomspace(100, config.rounds, 25).astype(int))
    places = np.maximum(marks // every, 1) - 1
    found = errors(made, case, hypers_by_round(config, made, method, network, every))
    return {
        "T": ((places + 1) * every).tolist(),
        "distance": found.mean(0)[places].tolist(),
        "distance_std": found.std(0, ddof=1)[places].tolist(),
        "slope": slope(np.arange(1, found.shape[1] + 1) * every, found.mean(0)),
    }


def hypers_by_round(
    config: Private, made: Stream, method: LDPDSBO, network: Network, every: int
) -> Float[np.ndarray, "seeds points n size"]:
    """Return the hypers of every client at the recorded rounds, for every seed."""
    recipe, start = program_of(method, problem_of(made)), jnp.zeros((config.clients, SIZE))
    record = {LOOP: lambda state, ctx: state.hyper}

    @jax.jit
    @jax.vmap
    def one(key):
        drawing, running = jax.random.split(key)
        data = samples(made, config.rounds, config.spread, drawing)
        return evaluate(recipe, network, BilevelState(start, start), data, running, record=record, every=every)[1][LOOP]

    return np.asarray(one(jax.random.split(jax.random.key(config.seed), config.seeds)), np.float64)


def attack(config: Private, made: Stream, algorithm: LDPDSBO, network: Network) -> Audit:
    """Bound ε from below: distinguish two values of client 0's first sample by its first noisy messages.

    The two values differ along (1, 1), where clipping in ℓ2 leaves the largest ℓ1 change, which Laplace noise has to
    hide. The attacker computes client 0's messages from what the others hear. Then it subtracts the part that follows
    from messages to client 0; the effect of client 0's own samples remains.
    """
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
    def observe(sign, keys):
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

    runs = partial(observe, 1.0), partial(observe, -1.0)
    return audit_epsilon(*runs, config.trials, seed=config.seed, chunk=50_000)


def report(run: StudyRun, result: dict[str, Any]) -> None:
    """Show a table, and draw the curves."""
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
    spent = Curve("spent", budget["T"][1:], budget["epsilon"][1:])  # without the first round, which costs nothing
    error_curves(axes[1], [spent, limit], x_label="rounds T", y_label="ε", log_x=True)
    run.figure("private", figure)
