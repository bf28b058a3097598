"""Noise at the releases of a leaf: its scale, when it is drawn, and the releases of private problems."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import hyperpush as hp
from hyperpush.data.batches import Data, Numbered
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.inner.base import InnerState
from hyperpush.privacy import Gaussian, Laplace
from hyperpush.privacy.noise_at_releases import Noising, count_releases
from hyperpush.programs import Context, Local, Repeat, Sequence, profile, program_of, trace_leaf
from hyperpush.programs.counting import accesses, repeated, work_of
from hyperpush.task.private_problem import Noise, PrivateProblem
from hyperpush.task.problem import Problem
from hyperpush.verbs.budget import program_releases

SIZE, ROWS, CLIENTS = 4, 10, 3
SIGMA = 0.5


def flat(x, hyper, batch):
    """Return losses whose derivatives are all zero, so that only noise is left."""
    return 0.0 * (jnp.sum(x) + jnp.sum(hyper)) ** 3 * jnp.mean(batch, axis=-1)


def fitted(x, hyper, batch):
    return 0.5 * jnp.sum((x - batch) ** 2, axis=-1)


def l2(x, hyper):
    return 0.5 * jnp.sum(jnp.exp(hyper) * x**2)


def private(cost, sigma=SIGMA, clip=ROWS / 2, mechanism=Gaussian, **options):
    """Return a private problem with noise of scale sigma: one example changes a mean by at most 1."""
    noise = Noise(mechanism(sigma), clip, curvature=clip, coupling=clip)
    return PrivateProblem.of(Problem(cost, cost, **options), noise)


def context(seed=0, rows=None, client=0, round=0):
    rows = jnp.zeros((ROWS, SIZE)) if rows is None else rows
    return Context(jnp.int32(client), CLIENTS, jnp.int32(round), jax.random.key(seed), Data.pair(rows, rows))


def examples(ctx):
    return ctx.data.train


X, HYPER = jnp.zeros(SIZE), jnp.zeros(SIZE)
FLAT = private(flat)


def noised(f, noise=FLAT.noise):
    """Return the leaf with this noise, whatever problem it uses."""
    return Noising(noise.mechanism, noise.hypers == "per example").add(f)


def gradient(x, ctx, problem=FLAT):
    return problem.inner_gradient(x, HYPER, examples(ctx))


def in_scan(x, ctx):
    return jax.lax.scan(lambda total, _: (total + gradient(x, ctx), None), x, None, length=5)[0]


def in_nested_fori(x, ctx):
    def row(_, total):
        return jax.lax.fori_loop(0, 3, lambda _, total: total + gradient(x, ctx), total)

    return jax.lax.fori_loop(0, 2, row, x)


def in_while(x, ctx):
    def body(held):
        return held[0] + 1, held[1] + gradient(x, ctx)

    with repeated(4):
        return jax.lax.while_loop(lambda held: held[0] < 4, body, (0, x))[1]


def in_branch(x, ctx):
    def once(k, total):
        return jax.lax.cond(k % 2 == 0, lambda t: t + gradient(x, ctx), lambda t: t, total)

    return jax.lax.fori_loop(0, 6, once, x)


def in_vmap(x, ctx):
    return jnp.sum(jax.vmap(lambda s: gradient(s * x, ctx))(jnp.arange(4.0)), axis=0)


def in_two_vmaps(x, ctx):
    row = jnp.arange(3.0)
    each = jax.vmap(lambda s: jax.vmap(lambda r: gradient(s * x, ctx) + gradient(r * x, ctx))(row))(row)
    return jnp.sum(each, axis=(0, 1))


def in_scan_of_vmap(x, ctx):
    return jax.lax.scan(lambda total, _: (total + in_vmap(x, ctx), None), x, None, length=3)[0]


def in_calls(x, ctx):
    @jax.custom_jvp
    def with_jvp(x):
        return gradient(x, ctx)

    @jax.custom_vjp
    def with_vjp(x):
        return gradient(x, ctx)

    with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0]))
    with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, c: (c,))
    once = jax.jit(lambda x: gradient(x, ctx))
    return once(x) + once(x) + jax.checkpoint(lambda x: gradient(x, ctx))(x) + with_jvp(x) + with_vjp(x)


def in_lazy_map(x, ctx):
    return jnp.sum(jax.lax.map(lambda s: gradient(s * x, ctx), jnp.arange(5.0), batch_size=2), axis=0)


# ------------------------------------------------------------------ independent noise


def drawn(leaf, number, round=0, noise=FLAT.noise):
    """Return the leaf's results on zero data for `number` keys."""
    rows = jnp.zeros((ROWS, SIZE))

    @jax.jit
    @jax.vmap
    def run(key):
        return noised(leaf, noise)(X, Context(jnp.int32(0), 1, jnp.int32(round), key, Data.pair(rows, rows)))

    return jax.tree.map(np.asarray, run(jax.random.split(jax.random.key(3), number)))


@pytest.mark.parametrize(
    ("leaf", "releases", "mechanism"),
    [
        (gradient, 1, Gaussian),
        (in_scan, 5, Gaussian),
        (in_scan, 5, Laplace),
        (in_nested_fori, 6, Gaussian),
        (in_while, 4, Gaussian),
        (in_branch, 3, Gaussian),
        (in_vmap, 4, Gaussian),
        (in_scan_of_vmap, 12, Laplace),
        (in_calls, 5, Gaussian),
        (in_lazy_map, 5, Gaussian),
    ],
)
def test_noise_of_zero_gradients_adds_up_as_independent_draws_do(leaf, releases, mechanism):
    found = drawn(leaf, 4000, noise=private(flat, mechanism=mechanism).noise)
    # The ℓ1 sensitivity is √SIZE times the ℓ2 one; Laplace noise of scale ν has the variance 2ν².
    once = SIGMA**2 if mechanism is Gaussian else 2 * SIZE * SIGMA**2
    assert np.var(found) == pytest.approx(releases * once, rel=0.06)
    assert np.abs(np.mean(found)) < 5 * np.sqrt(releases * once / found.size)
    across = np.corrcoef(found.T) - np.eye(SIZE)
    assert np.abs(across).max() < 0.08


def test_shared_release_is_one_draw_for_all_that_use_it():
    """The outer gradient does not vary in the inner map, so it is released once per outer member and reused."""
    found = drawn(in_two_vmaps, 4000)
    # The sum is 3·(a1 + a2 + a3) + 3·(b1 + b2 + b3), with six draws.
    assert np.var(found) == pytest.approx(9 * 6 * SIGMA**2, rel=0.06)


def test_no_two_releases_of_a_leaf_draw_the_same():
    def every(x, ctx):
        first = gradient(x, ctx)
        loop = jax.lax.scan(lambda _, __: (0, gradient(x, ctx)), 0, None, length=3)[1]
        mapped = jax.vmap(lambda s: gradient(s * x, ctx))(jnp.arange(3.0))
        return jnp.concatenate([first[None], loop, mapped, gradient(x, ctx)[None]])

    found = np.asarray(jax.jit(noised(every))(X, context()))
    assert np.unique(found).size == found.size == 8 * SIZE


def test_noise_follows_the_keys_of_clients_and_not_how_they_are_run():
    leaf = noised(in_scan)

    def run(key, client):
        rows = jnp.zeros((ROWS, SIZE))
        return leaf(X, Context(client, CLIENTS, jnp.int32(0), key, Data.pair(rows, rows)))

    keys = jax.random.split(jax.random.key(5), CLIENTS)
    together = jax.jit(jax.vmap(run))(keys, jnp.arange(CLIENTS))
    alone = jnp.stack([run(keys[i], jnp.int32(i)) for i in range(CLIENTS)])
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    assert np.unique(np.asarray(together)).size == together.size
    # Adding noise twice has no further effect, so the engine may apply it to a leaf that already has noise.
    np.testing.assert_array_equal(noised(leaf)(X, context()), leaf(X, context()))


def test_leaf_without_release_is_left_alone():
    def leaf(x, ctx):
        return {"twice": 2 * x, "drawn": jax.random.normal(ctx.key, (2,)), "static": None}

    before, after = leaf(X, context()), noised(leaf)(X, context())
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert noised(leaf).__name__ == "leaf"


def test_scale_falls_with_the_number_of_the_release():
    """In each round r with R releases, release k has the number r·R + k."""
    falling = PrivateProblem.of(Problem(flat, flat), Noise(Gaussian(hp.schedule("power", 8.0, 1.0)), ROWS / 2))

    def leaf(x, ctx):
        return jax.lax.scan(lambda _, __: (0, gradient(x, ctx, falling)), 0, None, length=3)[1]

    def wasteful(x, ctx):
        """Unused releases get no number."""
        gradient(2 * x, ctx, falling)
        return leaf(x, ctx)

    np.testing.assert_array_equal(drawn(wasteful, 10, 2, falling.noise), drawn(leaf, 10, 2, falling.noise))
    found = drawn(leaf, 3000, 2, falling.noise).std(axis=(0, 2))
    np.testing.assert_allclose(found, 8 / np.array([7, 8, 9]), rtol=0.05)


def zero_task(clients, cost=flat, rows=None, **options):
    rows = jnp.zeros((clients, ROWS, SIZE)) if rows is None else rows
    zeros = jnp.zeros(SIZE)
    return hp.Task(inner=cost, outer=cost, params=zeros, hypers=zeros, train=rows, validation=rows, **options)


def test_fedavg_draws_for_every_mini_batch():
    """Without averaging, FedAvg's params are a random walk of 2 rounds of 3 epochs of 2 mini-batches."""
    network, n = hp.networks.FullyConnected(2), 2
    task = zero_task(n).private(noise=Gaussian(1.0), clip=5 / 2)  # for mini-batches of 5 examples
    method = hp.FedAvg(2, 1.0, 3, 5, False)
    program, states, data = program_of(method, task.problem), InnerState(task.params, task.hypers), task.data

    @jax.jit
    @jax.vmap
    def walk(key):
        return hp.extend.evaluate(program, network, states, data, key)[0].params[0]

    keys = jax.random.split(jax.random.key(1), 3000)
    found = np.asarray(walk(keys))
    assert np.var(found) == pytest.approx(2 * 3 * 2 / n, rel=0.06)  # the mean of n random walks of 12 steps
    trained = hp.train(task, method, network, key=keys[0])
    np.testing.assert_allclose(trained.params[0], found[0], rtol=1e-5)
    assert trained.costs.gradients == trained.privacy.releases["train"] == 2 * 3 * 2


def test_training_draws_for_every_client_and_step():
    """Without slopes, training is a random walk of the noise, here by the verb with many clients."""
    clients = 400
    task = zero_task(clients).private(noise=Gaussian(SIGMA), clip=ROWS / 2)
    alone = hp.train(task, hp.LocalSGD(5, 1.0), hp.networks.FullyConnected(clients), key=0)
    assert np.var(np.asarray(alone.params)) == pytest.approx(5 * SIGMA**2, rel=0.1)
    # No two clients have the same draw.
    assert np.unique(np.asarray(alone.params)).size == alone.params.size


def test_bilevel_algorithm_without_privacy_of_its_own_has_noise_at_every_access():
    clients, steps = 3, 2
    network = hp.networks.FullyConnected(clients)
    task = zero_task(clients, common=True).private(
        noise=Gaussian(SIGMA), clip=ROWS / 2, curvature=ROWS / 2, coupling=ROWS / 2
    )
    method = hp.algorithms.MDBO(**{**hp.algorithms.MDBO.info.example, "steps": steps})
    found = [hp.solve(task, method, network, key=key) for key in range(2)]
    # Without noise the params would not change.
    for solution in found:
        assert np.abs(np.asarray(solution.params)).max() > 1e-3
        assert np.abs(np.asarray(solution.hypers)).max() > 1e-4
        assert solution.costs.accesses == solution.privacy.releases
    assert np.all(np.asarray(found[0].params) != np.asarray(found[1].params))
    plain = hp.solve(zero_task(clients, common=True), method, network, key=0, certify=False)
    np.testing.assert_array_equal(plain.params, 0)
    assert plain.costs.gradients == found[0].costs.gradients
    assert found[0].history.recorded_cost is None


def test_threads_draw_what_the_simulator_draws():
    rows = jax.random.normal(jax.random.key(2), (CLIENTS, ROWS, SIZE))
    task = zero_task(CLIENTS, fitted, rows).private(noise=Gaussian(SIGMA), clip=ROWS / 2)
    network = hp.networks.FullyConnected(CLIENTS)
    both = [
        hp.train(task, hp.FedAvg(2, 0.5, 2, 5), network, key=4, engine=engine).params
        for engine in (hp.Simulate(), hp.Threads())
    ]
    np.testing.assert_allclose(*both, rtol=1e-5)


def test_new_noise_compiles_nothing():
    rows = jax.random.normal(jax.random.key(2), (CLIENTS, ROWS, SIZE))
    network, compiled = hp.networks.FullyConnected(CLIENTS), []

    def listen(event, duration_secs, **kwargs):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    def train(sigma, clip):
        task = zero_task(CLIENTS, fitted, rows).private(noise=Gaussian(sigma), clip=clip)
        return hp.train(task, hp.SGP(3, 0.5), network, key=4).params

    first = train(1.0, 2.0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        second = train(3.0, 5.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert np.all(np.asarray(first) != np.asarray(second))


# ------------------------------------------------------------------ a private problem


def of_leaf(f, *args):
    return trace_leaf(f, CLIENTS, context().data, *args)[1].jaxpr


@pytest.mark.parametrize("ragged", [False, True])
def test_private_problem_is_the_problem_when_nothing_is_clipped_and_noise_is_nothing(ragged):
    def cost(x, hyper, rows):
        return 0.5 * jnp.exp(0.1 * hyper[0]) * jnp.sum((x - rows) ** 2, axis=-1)

    plain = Problem(cost, cost, l2, l2)
    hidden = PrivateProblem.of(plain, Noise(Gaussian(1e-9), 1e6, 1e6, 1e6))
    assert hidden.private
    assert not plain.private
    keys = jax.random.split(jax.random.key(0), 4)
    x, hyper, v = (jax.random.normal(key, (SIZE,)) for key in keys[:3])
    rows = jax.random.normal(keys[3], (ROWS, SIZE))
    batch = hp.Batch(rows, (jnp.arange(ROWS) < 7).astype(float)) if ragged else rows

    def everything(problem):
        at = x, hyper, batch
        return lambda ctx: (
            problem.inner_gradient(*at),
            problem.outer_gradients(*at),
            problem.hessian_product(*at, v),
            problem.jacobian_product(*at, v),
            problem.products(*at, v),
            problem.inner_cost(*at),
            problem.with_l2(0.3).inner_gradient(*at),
        )

    found, right = jax.jit(noised(everything(hidden), hidden.noise))(context()), everything(plain)(context())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), found, right)


def test_examples_are_clipped_and_penalties_are_not():
    rows = jnp.zeros((ROWS, SIZE)).at[0].set(1e6)
    x = jnp.full(SIZE, 100.0)
    hidden = PrivateProblem.of(Problem(fitted, fitted, l2), Noise(Gaussian(1e-9), 1.0))
    found = noised(lambda x, ctx: hidden.inner_gradient(x, HYPER, examples(ctx)), hidden.noise)(x, context(rows=rows))
    # Nine examples pull with norm 1 to one side, one with norm 1 to the other side; the penalty pulls with the full x.
    np.testing.assert_allclose(found, x + (9 - 1) / ROWS / np.sqrt(SIZE), rtol=1e-5)


def test_accesses_count_once_and_releases_by_data_set():
    hidden = private(fitted)

    def leaf(x, ctx):
        along = hidden.inner_gradient(x, HYPER, examples(ctx))
        v = hidden.outer_gradients(x, HYPER, ctx.data.outer)[0]
        steps = jax.lax.scan(lambda v, _: (hidden.hessian_product(x, HYPER, examples(ctx), v), None), v, None, length=7)
        unused = hidden.inner_gradient(2 * x, HYPER, examples(ctx))
        del unused
        return along, steps[0], sum(hidden.products(x, HYPER, examples(ctx), v))

    for made in (leaf, noised(leaf)):
        jaxpr = of_leaf(made, X)
        assert work_of(jaxpr) == {
            "gradients": 2,
            "hessian_products": 8,
            "jacobian_products": 1,
            accesses("train"): 10,
            accesses("validation"): 1,
        }
        assert count_releases(jaxpr) == {"train": 1 + 7 + 2, "validation": 1}
    mapped = of_leaf(lambda x, ctx: jax.vmap(lambda s: gradient(s * x, ctx))(jnp.arange(4.0)), X)
    assert count_releases(mapped) == {"train": 4}


def counted(program, state):
    leaves, _ = program_releases(program, state, context().data, CLIENTS)
    return {on: sum(leaf.total for leaf in leaves if leaf.on == on) for on in ("train", "validation")}


@pytest.mark.parametrize("add_noise", [lambda program: program, FLAT.protect])
@pytest.mark.parametrize(
    ("method", "state", "train", "validation"),
    [
        (hp.SGP(7, 0.1), InnerState(X, X), 7, 0),
        (hp.FedAvg(2, 0.1, 3, 5), InnerState(X, X), 2 * 3 * 2, 0),
        (hp.HGP(4, 3, 0.1), HypergradientState(X, X, X), 3 + 1, 1),
        (hp.HGP(0, 3, 0.1), HypergradientState(X, X, X), 0, 1),
        (hp.TrackedHGP(4, 0.1, 2, tolerance=None), HypergradientState(X, X, X), 3 + 1, 1),
    ],
)
def test_releases_of_a_program(method, state, train, validation, add_noise):
    program = add_noise(method.program(private(fitted)))
    assert counted(program, state) == {"train": train, "validation": validation}


def test_releases_of_loops_that_clients_agree_to_end():
    loop = Repeat(Local(gradient), 6, until=lambda x, ctx: gradient(x, ctx)[0] > 0)
    assert counted(Repeat(Sequence(Local(gradient), loop), 2), X) == {"train": 2 * (1 + 6 * 2), "validation": 0}


def test_conjugate_gradients_release_every_product():
    hidden = private(fitted, sigma=1e-4, clip=10.0)

    def leaf(x, ctx):
        with repeated(3):
            return jax.scipy.sparse.linalg.cg(
                lambda v: hidden.hessian_product(x, HYPER, examples(ctx), v), x + 1, tol=0.0, maxiter=3
            )[0]

    found = noised(leaf, hidden.noise)(X, context())
    np.testing.assert_allclose(found, 1, rtol=1e-2)  # the Hessian is the identity
    assert np.any(np.asarray(found) != noised(leaf, hidden.noise)(X, context(seed=1)))
    assert count_releases(of_leaf(leaf, X)) == {"train": 1 + 3}


def test_profile_of_a_noised_program_counts_what_the_program_does():
    def step(x, ctx):
        return x - 0.1 * in_scan(x, ctx)

    program = Repeat(Sequence(Local(step), Local(step)), 3)
    data = context().data
    counts = [profile(p, X, data, CLIENTS).total({}) for p in (program, FLAT.protect(program))]
    assert counts[0] == counts[1] == {"gradients": 3 * 2 * 5, accesses("train"): 3 * 2 * 5}


def test_hypers_of_examples_get_no_noise_and_are_no_release():
    def weighted(x, hyper, rows):
        return hyper * fitted(x, hyper, rows)

    rows = Numbered(jnp.arange(ROWS), jnp.ones((ROWS, SIZE)))
    noise = Noise(Gaussian(1.0), 1.0, 1.0, hypers="per example")
    hidden = PrivateProblem.of(Problem(weighted, fitted, by_example=(True,)), noise)
    hyper = jnp.ones(ROWS)

    def leaf(x, ctx):
        return hidden.jacobian_product(x, hyper, ctx.data.train, x), hidden.outer_gradients(x, hyper, ctx.data.train)

    product, (_, direct) = noised(leaf, noise)(jnp.full(SIZE, 2.0), context(rows=rows))
    np.testing.assert_allclose(product, np.full(ROWS, SIZE * 2.0 / ROWS), rtol=1e-6)
    assert np.all(np.asarray(direct) == 0)
    shapes = Data.pair(rows, rows)
    assert count_releases(trace_leaf(leaf, 1, shapes, X)[1].jaxpr) == {"validation": 1}


# ------------------------------------------------------------------ what is refused


def refused(call, *words):
    with pytest.raises(hp.InvalidInput) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.grad(lambda x: jnp.sum(f(x)))(x),
        lambda f, x: jax.linearize(f, x)[1](x),
        lambda f, x: jax.jacrev(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])(x),
    ],
)
def test_derivative_of_a_release_is_refused_with_file_and_line(differentiate):
    ctx = context()
    refused(
        lambda: differentiate(lambda x: gradient(x, ctx), X), "a derivative of a released", "test_release.py:", "HGP"
    )


def test_release_without_noise_cannot_run():
    words = "without noise", "while an engine runs it"
    refused(lambda: gradient(X, context()), *words, "test_release.py:")
    refused(lambda: jax.jit(lambda x: gradient(x, context()))(X), *words)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x),
        lambda x: jax.debug.callback(lambda x: None, x),
        lambda x: jax.pure_callback(lambda x: x, x, x),
        lambda x: io_callback(lambda x: x, x, x),
    ],
)
def test_leaf_that_calls_the_host_is_refused(call):
    def leaf(x, ctx):
        jax.lax.fori_loop(0, 2, lambda _, x: (call(x), x)[1], x)
        return gradient(x, ctx)

    refused(lambda: noised(leaf)(X, context()), "test_release.py:", "leaf", "calls to the host")


def test_release_in_the_condition_of_a_loop_is_refused():
    def leaf(x, ctx):
        with repeated(4):
            return jax.lax.while_loop(lambda x: gradient(x, ctx)[0] < 1, lambda x: x + 1, x)

    refused(lambda: noised(leaf)(X, context()), "condition of a while loop")


def test_bounds_that_are_missing_are_named():
    hidden = PrivateProblem.of(Problem(fitted, fitted), Noise(Gaussian(1.0), 1.0))
    refused(lambda: hidden.hessian_product(X, HYPER, jnp.ones((3, SIZE)), X), "task.private.curvature")
    refused(lambda: hidden.products(X, HYPER, jnp.ones((3, SIZE)), X), "task.private.curvature")
    refused(lambda: PrivateProblem.of(hidden, hidden.noise), "not private yet")


def test_noise_is_the_tasks_whatever_a_method_makes_of_its_problem():
    """A leaf whose problem declares less noise or another norm still gets the noise that the budget counts."""

    def leaf(x, ctx):
        quiet = replace(FLAT, noise=Noise(Gaussian(1e-9), ROWS / 2))
        return quiet.inner_gradient(x, HYPER, examples(ctx))

    assert np.std(drawn(leaf, 4000)) == pytest.approx(SIGMA, rel=0.05)
    found = drawn(leaf, 4000, noise=Noise(Laplace(SIGMA), 1.0))
    assert np.std(found) == pytest.approx(np.sqrt(2 * SIZE) * SIGMA, rel=0.05)


def test_runs_that_follow_each_other_draw_other_noise_with_the_same_key():
    """With the same noise, the difference of two releases would contain no noise."""
    network = hp.networks.FullyConnected(CLIENTS)
    task = zero_task(CLIENTS).private(noise=Gaussian(SIGMA), clip=ROWS / 2)
    first = hp.train(task, hp.LocalSGD(1, 1.0), network, key=0)
    second = hp.train(first.task, hp.LocalSGD(1, 1.0), network, key=0)
    third = hp.train(second.task, hp.LocalSGD(1, 1.0), network, key=0)
    moves = np.stack([first.params, second.params - first.params, third.params - second.params])
    assert np.unique(moves).size == moves.size
    np.testing.assert_array_equal(hp.train(task, hp.LocalSGD(1, 1.0), network, key=0).params, first.params)
