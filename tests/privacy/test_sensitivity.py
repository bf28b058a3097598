"""The bounds compared with true changes if one example is replaced and received messages stay the same."""

import math

import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.base.schedules import Power
from hyperpush.privacy.sensitivity import Constants, LoopSensitivity

ROUNDS = 40
STEPS = {"y": Power(0.6, 0.7), "z": Power(0.5, 0.8), "x": Power(0.4, 0.75)}
OTHERS = 0.3
# log cosh has slope tanh and curvature sech², whose slope is at most 4/(3√3).
CONSTANTS = Constants(
    C_y=0.9, C_b=1.5, C_x=0.7, R=1.2, C_H=1, C_J=0.5, L_H=4 / 3 / math.sqrt(3), L_J=0.5, L_b=0.4, L_fx=0.3
)


def clip(vectors, bound):
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1, bound / np.maximum(norms, 1e-300))


def single_loop(use, samples, heard):
    """Return the messages of one client in every round.

    Its inner cost is g = Σ log cosh(y − ξ) + a yᵀ sin x, its outer cost f = ½·0.4‖y − φ‖² + ½·0.3‖x − c‖².
    """
    dim = heard["y"].shape[-1]
    now = {name: np.zeros(dim) for name in "yzx"}
    sent = {name: [] for name in "yzx"}
    clips = {"y": 0.9, "Hz": 1.2, "b": 1.5, "x": 0.7, "Jz": 0.6}
    for t in range(ROUNDS):
        for name, value in now.items():
            sent[name].append(value)
        used = {"running averages": slice(0, t + 1), "once": slice(t, t + 1), "reused": slice(0, 5)}[use]
        xi, phi, c, a = (samples[key][used].reshape(-1, dim) for key in ("xi", "phi", "c", "a"))
        y, z, x = (now[name] for name in "yzx")
        means = {
            "y": clip(np.tanh(y - xi) + a * np.sin(x), clips["y"]).mean(0),
            "Hz": clip(z / np.cosh(y - xi) ** 2, clips["Hz"]).mean(0),
            "b": clip(0.4 * (y - phi), clips["b"]).mean(0),
            "x": clip(0.3 * (x - c), clips["x"]).mean(0),
            "Jz": clip(a * np.cos(x) * z, clips["Jz"]).mean(0),
        }
        slope = {"y": means["y"], "z": means["Hz"] - means["b"], "x": means["x"] - means["Jz"]}
        now = {
            name: (1 - OTHERS) * now[name]
            + OTHERS * heard[name][t]
            - STEPS[name].scale / (t + 1) ** STEPS[name].exponent * slope[name]
            for name in "yzx"
        }
        now["z"] = clip(now["z"], CONSTANTS.R)
    return {name: np.array(values) for name, values in sent.items()}


def changes(use, changed, dim, examples, seed):
    """Return the norms of the true changes in a client's messages."""
    rng = np.random.default_rng(seed)
    heard = {name: rng.laplace(size=(ROUNDS, dim)) for name in "yzx"}
    samples = {key: rng.normal(size=(ROUNDS, examples, dim)) * 3 for key in ("xi", "phi", "c")}
    samples["a"] = rng.uniform(-0.5, 0.5, (ROUNDS, examples, dim))
    other = {key: values.copy() for key, values in samples.items()}
    for key, sign in (("xi", 1), ("phi", -1), ("c", 1), ("a", 1)):
        far = 0.1 if key == "a" else 50.0
        samples[key][changed, 0], other[key][changed, 0] = sign * far, -sign * far
    runs = [single_loop(use, given, heard) for given in (samples, other)]
    return {name: np.linalg.norm(runs[0][name] - runs[1][name], axis=1) for name in "yzx"}


@pytest.mark.parametrize(
    ("use", "examples", "total"),
    [("running averages", 1, 1), ("running averages", 3, 3), ("once", 2, 2), ("reused", 1, 5)],
)
def test_no_change_is_larger_than_its_bound(use, examples, total):
    sender = LoopSensitivity(CONSTANTS, STEPS, 2, 2, use=use, others=OTHERS, examples=total)
    worst = sender.sensitivities(ROUNDS)
    for dim in (1, 2):
        for changed in (0, 3) if use == "reused" else (0, 3, 20):
            first = 0 if use == "reused" else changed
            bounds = sender.sensitivities(ROUNDS, first)
            for seed in range(5):
                true = changes(use, changed, dim, examples, seed)
                for name in "yzx":
                    assert (true[name] <= bounds[name] * (1 + 1e-12)).all()
                    assert (true[name][: first + 1] == 0).all()
                    if use == "running averages":
                        assert (bounds[name] <= worst[name]).all()
                # The two examples pull y in almost opposite directions; at their first use the bound is nearly
                # attained.
                assert true["y"][first + 1] > 0.7 * bounds["y"][first + 1]


def test_the_slopes_are_needed():
    """Without slopes the bound is wrong, which shows that the test above can fail."""
    flat = Constants(C_y=0.9, C_b=1.5, C_x=0.7, R=1.2, C_H=0, C_J=0, L_H=0, L_J=0, L_b=0, L_fx=0, C_Hz=1.2, C_Jz=0.6)
    bounds = LoopSensitivity(flat, STEPS, 2, 2, use="once", others=OTHERS).sensitivities(ROUNDS, 0)
    true = [changes("once", 0, 1, 1, seed) for seed in range(20)]
    assert any((change[name] > bounds[name] * (1 + 1e-9)).any() for change in true for name in "yzx")


def plain_recursion(keep, rounds, slopes, clips):
    delta, found = np.zeros(3), []
    for t in range(rounds):
        found.append(delta)
        steps = np.array([STEPS[name].scale / (t + 1) ** STEPS[name].exponent for name in "yzx"])
        delta = keep * delta + steps * np.minimum(2 * clips / (t + 1) + slopes @ delta, 2 * clips)
        delta[1] = min(delta[1], 2 * CONSTANTS.R)
    return np.array(found)


def test_the_recursion_for_every_client():
    """Compare with the recursion Δ⁺ = (1 − |w_ii|)Δ + λ(2C/(t + 1) + AΔ)."""
    third = 4 / 3 / math.sqrt(3)
    z, x = third * 1.2 + 0.4, 0.5 * 1.2 + 0.3
    slopes, clips = np.array([[1, 0, 0.5], [z, 1, z], [x, 0.5, x]]), np.array([0.9, 1.2 + 1.5, 0.7 + 0.6])
    others = np.array([0.3, 0.9])
    found = LoopSensitivity(CONSTANTS, STEPS, 1, 1, others=others).sensitivities(ROUNDS)
    for client, weight in enumerate(others):
        truth = plain_recursion(1 - weight, ROUNDS, slopes, clips)
        for number, name in enumerate("yzx"):
            np.testing.assert_allclose(found[name][:, client], truth[:, number], rtol=1e-12)


def test_without_smoothness_only_clipping_counts():
    """From the second round on, every round may differ by two full clips."""
    unknown = Constants(C_y=1, C_b=1, C_x=1, R=5, C_Hz=2, C_Jz=0)
    found = LoopSensitivity(unknown, Power(0.1), 1, 1, others=0.5).sensitivities(ROUNDS)
    t = np.arange(ROUNDS)
    np.testing.assert_allclose(found["y"], 0.1 * 2 * (1 - 0.5**t) / 0.5, rtol=1e-12)
    np.testing.assert_allclose(found["z"], 0.1 * 6 * (1 - 0.5**t) / 0.5, rtol=1e-12)


FINE = Constants(C_y=1, C_b=1, C_x=1, R=1, C_H=1, C_J=1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constants(C_y=0, C_b=1, C_x=1, R=1, C_H=1, C_J=1), r"Constants\.C_y.*above 0"),
        (lambda: Constants(C_y=1, C_b=math.inf, C_x=1, R=1, C_H=1, C_J=1), r"Constants\.C_b.*finite"),
        (lambda: Constants(C_y=1, C_b=1, C_x=1, R=0, C_H=1, C_J=1), r"Constants\.R"),
        (lambda: Constants(C_y=1, C_b=1, C_x=1, R=1, C_H=1, C_J=1, L_H=-1), r"Constants\.L_H"),
        (lambda: Constants(C_y=1, C_b=1, C_x=1, R=1, C_J=1), r"Constants\.C_Hz.*C_H is not known"),
        (lambda: LoopSensitivity(FINE, {"x": Power(1)}, 1, 1), r"LoopSensitivity\.steps.*each of y, z, x"),
        (lambda: LoopSensitivity(FINE, Power(1), 0, 1), r"LoopSensitivity\.params"),
        (lambda: LoopSensitivity(FINE, Power(1), 1, 1, others=1.5), r"LoopSensitivity\.others.*0 to 1"),
        (lambda: LoopSensitivity(FINE, Power(1), 1, 1, others=np.ones((3, 2))), "one per client"),
        (lambda: LoopSensitivity(FINE, Power(1), 1, 1, examples=0), r"LoopSensitivity\.examples"),
        (lambda: LoopSensitivity(FINE, Power(1), 1, 1).sensitivities(0), "rounds"),
    ],
)
def test_what_makes_no_sense_is_refused(build, message):
    with pytest.raises(InvalidInput, match=message):
        build()
