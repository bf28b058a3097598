import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hyperpush.base.errors import InvalidInput
from hyperpush.base.schedules import Power
from hyperpush.privacy.mechanisms import Gaussian, Laplace, clipped_mean, mean_of, project


def test_a_schedule_is_the_same_for_arrays_plain_and_traced_numbers():
    power = Power(3, 0.5)
    np.testing.assert_allclose(power(np.array([0, 3, 8])), [3, 1.5, 1])
    assert power(3) == 1.5
    assert float(jax.jit(power)(jnp.asarray(8))) == pytest.approx(1)
    assert Power(2)(10**6) == 2
    assert power.times(2) == Power(6, 0.5)


@pytest.mark.parametrize(("given", "field"), [((0, 1), "schedule.scale"), ((1, -0.1), "schedule.exponent")])
def test_schedules_that_make_no_sense_are_refused(given, field):
    with pytest.raises(InvalidInput, match=field):
        Power(*given)


@pytest.mark.parametrize(("mechanism", "law"), [(Laplace, stats.laplace), (Gaussian, stats.norm)])
def test_noise_has_its_law_and_scale_and_is_independent(mechanism, law):
    tree = {"a": jnp.zeros((100, 100)), "b": jnp.zeros(10_000)}
    noise = mechanism(Power(4, 0.5)).noise(jax.random.key(1), tree, 3)
    for leaf in noise.values():
        assert stats.kstest(np.ravel(leaf) / 2, law.cdf).pvalue > 1e-3  # 4/√4 = 2
    assert abs(np.corrcoef(np.ravel(noise["a"]), noise["b"])[0, 1]) < 0.05
    # Nine equal numbers with ℓ2 norm 1 have ℓ1 norm 3.
    assert mechanism(1.0).norm_of_unit(9) == {Laplace: 3, Gaussian: 1}[mechanism]


def test_a_number_is_a_constant_scale_and_nothing_else_is_one():
    assert Laplace(2.0) == Laplace(Power(2))  # type: ignore
    for given in (0, "much", Power):
        with pytest.raises(InvalidInput, match="scale of the noise"):
            Laplace(given)  # type: ignore


EXAMPLES = np.random.default_rng(0).normal(size=(6, 3)) * [[0.1], [1], [5], [0.2], [9], [0.3]]
EXAMPLES = EXAMPLES.astype(np.float32)


def both_parts(example):
    return {"one": example[:2], "two": example[2]}


def test_clipped_mean_is_that_of_scaled_examples():
    mask = np.array([1, 1, 1, 0, 1, 0], np.float32)
    norms = np.linalg.norm(EXAMPLES, axis=1)
    scaled = EXAMPLES * np.minimum(1, 2 / norms)[:, None]
    assert (norms > 2).any()
    assert (norms < 2).any()
    masked = jax.jit(lambda mask: clipped_mean(both_parts, EXAMPLES, 2.0, mask))
    for found, truth in (
        (jax.jit(lambda: clipped_mean(both_parts, EXAMPLES, 2.0))(), scaled.mean(0)),
        (masked(mask), mask @ scaled / 4),
        (masked(0 * mask), np.zeros(3)),
    ):
        np.testing.assert_allclose(np.append(found["one"], found["two"]), truth, rtol=1e-5, atol=1e-7)


mean = jax.jit(lambda examples: clipped_mean(lambda example: example, examples, 2.0))


@pytest.mark.parametrize("bad", [1e6, 1e30, np.inf, np.nan])
def test_no_example_can_change_a_clipped_mean_by_more_than_its_share(bad):
    """This includes an example whose gradient overflows."""
    changed = EXAMPLES.copy()
    changed[4] = [bad, -bad, 1]
    means = [mean(part) for part in (EXAMPLES, changed)]
    assert np.linalg.norm(means[0] - means[1]) <= 2 * 2 / 6 * (1 + 1e-5)


def test_means_hide_what_does_not_count_and_nothing_else():
    rows = jnp.array([[1.0, 2.0], [np.nan, np.inf], [3.0, 5.0]])
    found = mean_of({"a": rows}, jnp.array([1.0, 0.0, 1.0]))["a"]
    np.testing.assert_allclose(found, [2, 3.5])
    assert np.all(np.isnan(mean_of({"a": rows[:, :1]}, jnp.array([1.0, 1.0, 0.0]))["a"]))
    assert np.all(np.isnan(mean_of(rows[:, :1])))


def test_projection():
    tree = {"a": np.array([3.0, 0.0]), "b": np.array(4.0)}
    projected = jax.jit(project)
    found = projected(tree, 1.0)
    np.testing.assert_allclose(np.append(found["a"], found["b"]), [0.6, 0, 0.8], rtol=1e-6)
    assert float(projected(tree, 7.0)["a"][0]) == 3
    assert float(projected({"a": np.zeros(2), "b": np.zeros(())}, 1.0)["b"]) == 0


@pytest.mark.parametrize("bound", [0.0, -1, float("inf"), float("nan")])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(InvalidInput, match=r"bound.*finite number above 0"):
        clipped_mean(lambda example: example, EXAMPLES, bound)
