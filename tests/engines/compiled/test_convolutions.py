"""Convolutions reordered for speed inside loops give the same results."""

import itertools
import re
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hyperpush as hp
from hyperpush.engines.compiled import compile, convolutions

SPACE, LETTERS = {1: (20,), 2: (9, 8), 3: (6, 5, 5)}, "DHW"
KINDS = ((1, "VALID", 1), (2, "SAME", 1), (1, "SAME", 2))  # stride, padding, dilation
FEW = [(2, "NCHW", KINDS[0], 1, True), (2, "NHWC", KINDS[1], 2, True), (1, "NCHW", KINDS[2], 2, False)]
ALL = [
    case
    for case in itertools.product((1, 2, 3), ("NCHW", "NHWC"), KINDS, (1, 2), (False, True))
    if case[0] < 3 or (case[3] == 1 and case[2][2] == 1)
]


def make(size, order, kind, groups, batched):
    """Return a sum of gradients and a Hessian product, with arguments; `batched` gives three clients."""
    draw = np.random.default_rng(zlib.crc32(repr((size, order, kind, groups)).encode()))
    space, (stride, padding, dilation) = LETTERS[-size:], kind
    specs = ("NC" + space, "OI" + space, "NC" + space)
    if order == "NHWC":
        specs = ("N" + space + "C", space + "IO", "N" + space + "C")
    sizes = dict(zip(space, SPACE[size], strict=True)) | {"N": 3, "C": 4}
    kernel = dict.fromkeys(space, 3) | {"O": 6, "I": 4 // groups}
    lead = (3,) * batched
    x = jnp.asarray(draw.normal(size=(*lead, *(sizes[each] for each in specs[0]))), jnp.float32)
    w = jnp.asarray(draw.normal(size=(*lead, *(kernel[each] for each in specs[1]))), jnp.float32)

    def cost(x, w):
        options = {"rhs_dilation": (dilation,) * size, "dimension_numbers": specs, "feature_group_count": groups}
        return jnp.sum(jnp.tanh(lax.conv_general_dilated(x, w, (stride,) * size, padding, **options)))

    def both(x, w):
        gradient = jax.grad(cost, (0, 1))
        return gradient(x, w), jax.jvp(gradient, (x, w), (x, w))[1]

    return jax.vmap(both) if batched else both, (x, w)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FEW else pytest.mark.long, id=str(case)) for case in ALL]
)
def test_gradients_and_products_inside_a_loop_are_those_of_jax(case):
    both, given = make(*case)

    def looped(given, donated):
        def body(_, sums):
            return jax.tree.map(jnp.add, sums, both(*given))

        start = jax.tree.map(jnp.zeros_like, jax.eval_shape(both, *given))
        return lax.fori_loop(0, 2, body, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), start))

    expected = jax.jit(both)(*given)
    for ours, theirs in zip(jax.tree.leaves(compile.call(looped, given)), jax.tree.leaves(expected), strict=True):
        # sums of float32 numbers in another order
        assert np.max(np.abs(ours / 2 - theirs)) < 2e-5 * np.max(np.abs(theirs))


def loop_of_gradients(order):
    """Return a program whose loop contains gradients by inputs and kernels, and its arguments."""
    both, given = make(2, order, KINDS[0], 1, False)
    return lambda given: lax.fori_loop(
        0, 3, lambda _, held: jax.tree.map(jnp.subtract, held, both(*held)[0]), given
    ), given


def orders_of(compiled):
    """Return the axis orders of all convolutions in a compiled program."""
    return set(re.findall(r"dim_labels=(\S+?),? ", compiled.as_text().replace("\n", " ")))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the rule is for the CPU")
def test_the_rule_is_needed_and_reaches_loops_and_no_other_program():
    """XLA's fast kernels need one axis order; without the rule, XLA converts other orders only outside of loops."""
    if not convolutions.SUPPORTED:
        warnings.warn("JAX has moved its lowering parameters: convolutions in loops are slow again", stacklevel=1)
        return
    fast = "b01f_01io->b01f"
    loop, given = loop_of_gradients("NHWC")
    trace = jax.jit(loop).trace(given)
    assert orders_of(convolutions.lower(trace).compile()) == {fast}, "convolutions in loops are slow again"
    assert orders_of(jax.jit(loop).lower(given).compile()) > {fast}, "XLA reorders in loops: delete convolutions.py"


@pytest.mark.parametrize("batched", [False, True])
def test_many_groups_are_a_loop_with_the_same_results(monkeypatch, batched):
    """With the limit on groups set to 1, two groups of a convolution, or three clients' kernels, become a loop."""
    monkeypatch.setattr(convolutions, "MOST_GROUPS", 1)
    both, given = make(2, "NCHW", KINDS[0], 1 if batched else 2, batched)
    lowered = convolutions.lower(jax.jit(both).trace(*given)).as_text()
    assert "stablehlo.while" in lowered
    assert set(re.findall(r"feature_group_count = (\d+)", lowered)) == {"1"}
    ours = compile.call(lambda given, donated: both(*given), given)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.jit(both)(*given)), strict=True):
        assert np.max(np.abs(one - other)) < 2e-5 * np.max(np.abs(other))


def test_without_the_private_name_programs_are_lowered_plainly(monkeypatch):
    monkeypatch.setattr(convolutions, "SUPPORTED", False)
    both, given = make(2, "NCHW", KINDS[0], 1, False)
    ours = compile.call(lambda given, donated: both(*given), given)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.jit(both)(*given)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_second_call_with_other_numbers_compiles_nothing():
    task, network = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)
    hp.train(task, hp.SGP(5, 0.1), network, key=0)
    with compile.counting() as counts:
        hp.train(task, hp.SGP(5, 0.2), network, key=1)
    assert counts.compilations == 0
    with compile.counting() as counts:
        hp.train(task, hp.SGP(6, 0.2), network, key=1)
    assert counts.compilations > 0
    assert counts.lines > 10
