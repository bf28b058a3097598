"""Private runs of a comparison: the claimed ε, and its cost in accuracy."""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import jax
from jaxtyping import PRNGKeyArray

import hyperpush as hp
from hyperpush.data.batches import capacity
from hyperpush.networks import Network
from hyperpush.privacy import ASSUMPTION
from hyperpush.programs import one_client
from hyperpush.runs.run import StudyRun
from hyperpush_papers.common.comparison import Benchmark, Compared, Row, benchmark_of, best_run
from hyperpush_papers.common.config import Comparison, Privacy
from hyperpush_papers.common.methods import NESTED, nested_loops

QUIET = 1e6  # an ε so large that its noise is negligible
SINGLE = "LDPDSBO"  # the only single-loop algorithm that can run privately


def run_privately(
    config: Comparison,
    run: StudyRun,
    network: Network,
    found: Sequence[Compared],
    common: Benchmark,
    personal: Benchmark | None = None,
) -> list[Row]:
    """Run the methods that can be private, and add them to the result of `compare`.

    Each method also runs with the same settings at negligible noise. This separates the cost of the noise from the cost
    of the settings, which are fixed in advance.
    """
    if config.privacy is None:
        return []
    quiet = replace(config.privacy, epsilon=max(QUIET, config.privacy.epsilon))
    rows = []
    for plain in found:
        name = plain.row["method"]
        on, row = benchmark_of(name, common, personal), {"method": name}
        if name != SINGLE and name not in NESTED:
            row["reason"] = "n/a: this study runs LDPDSBO and PDBO privately"
        elif on.constants is None:
            row["reason"] = "n/a: no bounds on the second derivatives of this problem are known"
        else:
            noisy, claimed = private_row(config, config.privacy, name, network, on, private_key(config, name))
            same, _ = private_row(config, quiet, name, network, on, private_key(config, name, quiet=True))
            row |= {"epsilon": config.privacy.epsilon, "delta": config.privacy.delta, "claimed": claimed, **noisy}
            row |= costs_of_privacy(plain.row, same, noisy)
            row["assumes"] = ASSUMPTION
        rows.append(row)
        run.record(private=True, **row)
    return rows


def private_key(config: Comparison, name: str, quiet: bool = False) -> PRNGKeyArray:
    """Return the key of a method's private run; each run draws its own noise, and shares no draws with `compare`."""
    key = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(b"quiet" if quiet else b"private"))
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def private_row(
    config: Comparison, privacy: Privacy, name: str, network: Network, on: Benchmark, key: PRNGKeyArray
) -> tuple[Row, float]:
    """Run a method privately; return its row with the ε that it claims."""
    if name == SINGLE:
        method, claimed = calibrated_single_loop(privacy, network, on)
        task, steps = on.task, (privacy.loop_outer, privacy.loop_inner)
    else:
        task, method, claimed = calibrated_nested_loops(config, privacy, name, network, on)
        steps = privacy.outer * on.outer_unit, privacy.inner * on.inner_unit
    return best_run(name, on, task, network, [(*steps, method)], key=key).row, claimed


def calibrated_single_loop(privacy: Privacy, network: Network, on: Benchmark) -> tuple[hp.algorithms.LDPDSBO, float]:
    """Return LDP-DSBO with noise for a known number of iterations on a reused data set, and the ε that it claims.

    The noise on each variable is proportional to the largest change of the variable by one example.
    """
    assert on.constants is not None
    rows = min(capacity(one_client(each)) for each in (on.task.train, on.task.validation))
    kind, delta = (hp.privacy.Gaussian, privacy.delta) if privacy.delta else (hp.privacy.Laplace, None)
    step_sizes = {"x": privacy.loop_outer, "y": privacy.loop_inner, "z": privacy.loop_inner}
    constants = on.constants(privacy.clip, privacy.radius)

    def with_noise(noise):
        method = hp.algorithms.LDPDSBO(privacy.iterations, step_sizes, noise, constants, use="reused", checked=False)
        return method, method.accountant(network, on.task.params, on.task.hypers, rows)

    sender = with_noise(kind(1.0))[1].sender
    changes = sender.sensitivities(privacy.iterations)
    size = {key: sender.dims[key] ** (0.5 if kind is hp.privacy.Laplace else 0) for key in changes}
    balanced = {key: kind(max(float(change.max()) * size[key], 1e-9)) for key, change in changes.items()}
    noise = with_noise(balanced)[1].noise_for(privacy.epsilon, privacy.iterations, delta)
    method, account = with_noise(noise)
    return method, float(account.epsilon(privacy.iterations, delta).max())


def calibrated_nested_loops(
    config: Comparison, privacy: Privacy, name: str, network: Network, on: Benchmark
) -> tuple[hp.Task, hp.PDBO | hp.CDBO, float]:
    """Return the private task, on which PDBO gets only noisy gradients and products, PDBO, and the claimed ε."""
    assert on.constants is not None
    first, delta = (hp.privacy.Gaussian(1.0), privacy.delta) if privacy.delta else (hp.privacy.Laplace(1.0), None)
    constants, step = on.constants(privacy.clip, privacy.radius), privacy.inner * on.inner_unit
    hypers = "per example" if all(on.task.by_example) else "shared"
    along_y, along_x = (float(bound / constants.R) for bound in constants.products)  # finite, even if C_J is not given
    task = on.task.private(clip=privacy.clip, noise=first, curvature=along_y, coupling=along_x, hypers=hypers)
    outer = privacy.outer * on.outer_unit
    method = nested_loops(privacy, name, task, config.pushes, outer, step, hgp_step=step, tracked_step=step)
    task = hp.within_budget(privacy.epsilon, delta, task, method, network)
    return task, method, float(hp.budget(task, method, network).epsilon(delta))


def costs_of_privacy(best: Row, same: Row, noisy: Row) -> dict[str, float]:
    """Return the loss of accuracy by privacy, and its two parts; None for a run that diverged.

    `best` is the row without privacy, `noisy` the private row, and `same` that of the private settings with negligible
    noise.
    """
    if "accuracy" not in noisy or "accuracy" not in best:
        return {}
    found = {"accuracy_without": best["accuracy"], "cost_in_accuracy": best["accuracy"] - noisy["accuracy"]}
    if "accuracy" in same:
        found["accuracy_same_settings"] = same["accuracy"]
        found["cost_of_noise"] = same["accuracy"] - noisy["accuracy"]
        found["cost_of_settings"] = best["accuracy"] - same["accuracy"]
    return found
