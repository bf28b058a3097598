"""The certificate of params, which says whether they solve the inner problem, compared with dense algebra in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import System
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.hypergradients.disagreement import append_disagreement

CLIENTS, SIZE, EXAMPLES = 5, 4, 12
RING = hp.networks.Ring(CLIENTS)
pytestmark = pytest.mark.usefixtures("float64")


class Regression:
    """Least squares of heterogeneous clients with penalties exp(λ_i), and all certified quantities in closed form."""

    def __init__(self, seed=0, common=False):
        random = np.random.default_rng(seed)
        self.rows, self.validation = random.normal(size=(2, CLIENTS, EXAMPLES, SIZE))
        self.labels, self.held_out = random.normal(size=(2, CLIENTS, EXAMPLES))
        self.labels += random.normal(size=(CLIENTS, 1)) + self.rows @ random.normal(size=SIZE)

        def loss(x, hyper, batch):
            return (batch[0] @ x - batch[1]) ** 2 / 2

        self.task = hp.Task(
            inner=loss,
            penalty=lambda x, hyper: 0.5 * jnp.exp(hyper) * x @ x,
            outer=loss,
            params=jnp.zeros(SIZE),
            hypers=-1.0,
            train=(jnp.asarray(self.rows), jnp.asarray(self.labels)),
            validation=(jnp.asarray(self.validation), jnp.asarray(self.held_out)),
            common=common,
        )
        self.weight = np.exp(-1.0)
        self.hessians = np.einsum("kmi,kmj->kij", self.rows, self.rows) / EXAMPLES + self.weight * np.eye(SIZE)
        pulls = np.einsum("kmi,km->ki", self.rows, self.labels) / EXAMPLES
        self.solution = np.linalg.solve(self.hessians.mean(0), pulls.mean(0))

    def hypergradient(self, params):
        """Return all v_i at every client's own params, as `hp.hypergradient` defines them."""
        misses = np.einsum("kmi,ki->km", self.validation, params) - self.held_out
        source = np.einsum("kmi,km->ki", self.validation, misses).mean(0) / EXAMPLES
        along = np.linalg.solve(self.hessians.mean(0), source) / CLIENTS
        return -self.weight * params @ along

    def judged(self, params):
        """Return (residual, disagreement, moved), the three certified quantities."""
        mean = params.mean(0)
        step = mean - self.solution  # a Newton step reaches the solution of least squares
        away = np.sqrt(np.mean(np.sum((params - mean) ** 2, axis=1)))
        here, there = self.hypergradient(params), self.hypergradient(np.tile(self.solution, (CLIENTS, 1)))
        size = np.linalg.norm(mean)
        moved = np.linalg.norm(here - there) / np.linalg.norm(there)
        return np.linalg.norm(step) / size, away / size, moved


def numbers(status):
    return status.residual, status.disagreement, status.moved


@pytest.mark.parametrize("engine", [hp.Simulate(), hp.Threads()], ids=type)
@pytest.mark.long
def test_an_estimate_knows_how_far_its_params_are_off(engine):
    problem = Regression()
    random = np.random.default_rng(1)
    for off, apart in [(0.0, 0.3), (0.05, 0.0), (0.01, 0.01), (0.3, 0.1)]:
        shift = np.linalg.norm(problem.solution) * random.normal(size=(1 + CLIENTS, SIZE)) / 2
        params = problem.solution + off * shift[0] + apart * (shift[1:] - shift[1:].mean(0))
        found = hp.hypergradient(problem.task.at(params=params), hp.TreeCG(), RING, key=0, engine=engine)
        residual, disagreement, moved = problem.judged(params)
        passes = residual <= 0.1 and moved <= 0.03
        assert found.status.disagreement == pytest.approx(disagreement)
        # the Newton step may have an error of a tenth
        assert found.status.residual == pytest.approx(residual, rel=0.1, abs=1e-6)
        if residual <= 0.1:
            assert found.status.moved == pytest.approx(moved, rel=0.15)
        else:
            assert found.status.moved is None
        assert (found.status.converged, found.status.reason) == (passes, "tolerance" if passes else "unsolved")


def test_at_the_solution_nothing_is_estimated_again():
    problem = Regression()
    solved = problem.task.at(params=np.tile(problem.solution, (CLIENTS, 1)))
    found = hp.hypergradient(solved, hp.TreeCG(), RING, key=0)
    assert found.status.converged
    assert found.status.moved is None
    assert found.status.residual is not None
    assert found.status.residual < 1e-6
    alone = hp.hypergradient(solved, hp.TreeCG(), RING, key=0, certify=False)
    assert (alone.status.converged, alone.status.reason) == (None, "not certified")
    np.testing.assert_allclose(alone.value, found.value, rtol=1e-4)
    off = problem.task.at(params=np.tile(problem.solution * 1.01, (CLIENTS, 1)))
    costs = [hp.hypergradient(task, hp.TreeCG(), RING, key=0).costs.hessian_products for task in (solved, off)]
    assert alone.costs.hessian_products < costs[0] < costs[1]


@pytest.mark.parametrize("method", [hp.TrackedHGP(), hp.HGP(60, 10, 0.1), hp.hypergradients.Dense()], ids=type)
@pytest.mark.long
def test_other_estimators_are_judged_beside_the_run(method):
    """If params pass, the estimator's own verdict is kept; a verdict never improves."""
    problem = Regression()
    own = None if isinstance(method, hp.HGP) else True
    for off, good in [(0.001, True), (0.05, False)]:
        params = problem.solution * (1 + off * np.arange(CLIENTS)[:, None])
        status = hp.hypergradient(problem.task.at(params=params), method, RING, key=0).status
        assert numbers(status) == pytest.approx(problem.judged(params), rel=0.15)
        assert status.converged == (own if good else False)
        assert (status.reason == "unsolved") == (not good)


def test_hypers_that_agree_are_judged_by_the_mean():
    """Single v_i may change much while their mean hardly does, and the reverse."""
    problem = Regression(common=True)
    for seed in range(4):
        params = problem.solution + 0.05 * np.random.default_rng(seed).normal(size=(CLIENTS, SIZE))
        here, there = (problem.hypergradient(at).mean() for at in (params, np.tile(problem.solution, (CLIENTS, 1))))
        status = hp.hypergradient(problem.task.at(params=params), hp.TreeCG(), RING, key=0).status
        assert status.moved == pytest.approx(abs(here - there) / abs(there), rel=0.15)


def test_training_says_how_far_it_came():
    problem = Regression()
    solved = problem.task.at(params=np.tile(problem.solution, (CLIENTS, 1)))
    found = {}
    for task, steps, size in [(problem.task, 20, 0.1), (problem.task, 2000, 0.004), (solved, 20, 1e-6)]:
        trained = hp.train(task, hp.SGP(steps, size), RING, key=0)
        residual, disagreement, _ = problem.judged(np.asarray(trained.params))
        assert trained.status.residual == pytest.approx(residual, rel=0.1)
        assert trained.status.disagreement == pytest.approx(disagreement, rel=1e-5)
        away = residual + disagreement
        assert trained.status.converged == (True if away <= 2e-4 else None if away <= 0.02 else False)
        found[trained.status.converged] = trained.status.reason
    near = "near the solution: a hypergradient will check it; constant steps stop near the solution"
    assert found == {False: "unsolved", None: near, True: "tolerance"}
    unknown = hp.train(problem.task, hp.SGP(20, 0.1), RING, key=0, certify=False).status
    assert (unknown.converged, unknown.reason) == (None, "not certified; constant steps stop near the solution")


@pytest.mark.long
def test_only_the_first_and_the_last_outer_step_are_judged_and_later_ones_against_the_first():
    problem = Regression()
    solver, outer = hp.SGP(2000, 0.004), hp.optimizer("sgd", learning_rate=1e-9)

    def products(steps, **options):
        method = hp.PDBO(solver, hp.TreeCG(), outer, steps=steps, remember=False)
        return hp.solve(problem.task, method, RING, key=0, **options)

    one, two, five = (products(steps) for steps in (1, 2, 5))
    plain = products(1, certify=False).costs.hessian_products
    assert one.status.converged
    judged = one.costs.hessian_products - plain
    assert two.costs.hessian_products - 2 * plain == pytest.approx(2 * judged, rel=0.1)
    # Outer steps between the first and the last do not wait for a probe either.
    assert five.costs.hessian_products - 2 * judged <= 5 * plain


def pulled(curvatures, pulls, params):
    """Return clients with inner costs ½ Σ_j a_j x_j² − b_iᵀx + λ_i Σ_j x_j.

    At λ = 0 the mean problem has the solution mean(b)/a.
    """

    def inner(x, hyper, batch):
        return 0.5 * jnp.sum(curvatures * x**2) - batch[0] @ x + hyper * jnp.sum(x)

    return hp.Task(
        inner=inner,
        outer=lambda x, hyper, batch: jnp.sum((x - batch[0]) ** 2),
        params=jnp.asarray(params),
        hypers=0.0,
        train=jnp.asarray(pulls)[:, None],
        validation=jnp.full((CLIENTS, 1, len(params)), 3.0),
    )


@pytest.mark.parametrize("off", [0.03, 0.3, 1.0])
def test_params_that_are_off_in_a_weak_direction_are_seen(off):
    """A gradient of 1e-3 times the distance looks small, but a Newton step covers the full distance."""
    curvatures, solution = np.geomspace(1, 1e-3, 6), np.ones(6)
    pulls = curvatures * solution + np.random.default_rng(0).normal(size=(CLIENTS, 6))
    pulls -= pulls.mean(0) - curvatures * solution
    params = solution + off * np.linalg.norm(solution) * np.eye(6)[5]
    status = hp.hypergradient(pulled(curvatures, pulls, params), hp.TreeCG(), RING, key=0).status
    expected = off * np.linalg.norm(solution) / np.linalg.norm(params)
    assert status.residual == pytest.approx(expected, rel=0.02)
    assert status.converged == (expected <= 0.1 and status.moved is not None and status.moved <= 0.03)


def test_training_looks_for_a_weak_direction_behind_a_small_gradient():
    """The weak direction has a hundredth of the gradient and a hundred thousand times the distance."""
    curvatures, params = np.array([1, 1, 1e-7]), np.array([1 + 1e-5, 1, 2])
    status = hp.train(pulled(curvatures, np.tile(curvatures, (CLIENTS, 1)), params), hp.SGP(0, 0.1), RING, key=0).status
    off = np.linalg.norm(params - 1) / np.linalg.norm(params)
    assert (status.converged, status.reason, status.residual) == (False, "unsolved", pytest.approx(off, rel=0.02))


@pytest.mark.parametrize(
    ("solver", "flat"), [(hp.LocalSGD(60, 0.5), True), (hp.TrackedSGP(), None)], ids=["alone", "together"]
)
@pytest.mark.long
def test_training_that_ends_at_a_saddle_is_ill_posed(solver, flat):
    """No gradient is along the second direction: only a probe sees its curvature, which is −1 or, at a minimum, 0."""

    def train(bend):
        task = hp.Task(
            inner=lambda x, hyper, a: ((x[0] - a) ** 2 + bend * x[1] ** 2) / 2 + x[1] ** 4,
            outer=lambda x, hyper, a: x @ x,
            params=jnp.zeros(2), hypers=0.0, train=jnp.ones((CLIENTS, 1)), validation=jnp.zeros((CLIENTS, 1)),
        )  # fmt: skip
        return hp.train(task, solver, RING, key=0)

    saddle, level = train(-1.0), train(0.0)
    np.testing.assert_allclose(saddle.params, np.tile([1.0, 0.0], (CLIENTS, 1)), atol=1e-6)
    assert (saddle.status.converged, saddle.status.reason, saddle.status.residual) == (False, "ill-posed", None)
    assert level.status.converged is flat


@pytest.mark.parametrize("off", [0.05, 0.3])
def test_a_flat_direction_is_left_out_of_the_newton_step_of_least_norm(off):
    """All costs ignore the third direction; v_i = −(2/n) Σ (x_j − 3) over the other directions."""
    curvatures, params = np.array([1.0, 1.0, 0.0]), np.array([1 + off, 1.0, 3.0])
    task = pulled(curvatures, np.tile(curvatures, (CLIENTS, 1)), params)
    status = hp.hypergradient(task, hp.TreeCG(singular="minimum-norm"), RING, key=0).status
    assert status.residual == pytest.approx(off / np.linalg.norm(params), rel=0.02)
    assert status.moved == pytest.approx(off / 4, rel=0.02)
    assert status.converged == (off / 4 <= 0.03)


def test_params_of_zero_solve_only_what_zero_solves():
    pulls = np.tile(np.eye(2), (3, 1))[:CLIENTS] - np.tile(np.eye(2), (3, 1))[:CLIENTS].mean(0)
    network = RING
    level = hp.hypergradient(pulled(np.ones(2), pulls, np.zeros(2)), hp.TreeCG(), network, key=0).status
    assert (level.converged, level.residual) == (True, pytest.approx(0, abs=1e-12))
    far = hp.hypergradient(pulled(np.ones(2), pulls + 0.2, np.zeros(2)), hp.TreeCG(), network, key=0).status
    assert (far.converged, far.residual) == (False, np.inf)
    assert "the mean params are zero and should not be" in str(far)


def test_where_the_start_is_known_its_size_counts_beside_small_params():
    """From params of 1 to a solution near zero, a Newton step is small compared with the start."""
    problem = pulled(np.ones(2), np.full((CLIENTS, 2), 1e-3), np.ones(2))
    trained = hp.train(problem, hp.SGP(20, 0.3), RING, key=0)
    status = hp.hypergradient(trained.task, hp.TreeCG(), RING, key=0).status
    assert status.residual is not None
    assert status.residual > 0.1
    assert status.converged  # the hypergradient has size 3, so its change is relatively small
    alone = hp.hypergradient(problem.at(params=trained.params), hp.TreeCG(), RING, key=0).status
    assert (alone.converged, alone.reason) == (False, "unsolved")


def test_negative_curvature_at_the_mean_params_is_ill_posed():
    """Clients are at points where their own costs are convex, but the mean of these points is a maximum."""

    def inner(x, hyper, batch):
        return (x**2 - 1) ** 2 + 0.01 * hyper * x

    task = hp.Task(
        inner=inner,
        outer=lambda x, hyper, batch: (x - 2) ** 2,
        params=hp.per_client(jnp.asarray([-1.0, 1.1] * 2)),
        hypers=1.0,
        train=jnp.zeros((4, 1)),
        validation=jnp.zeros((4, 1)),
    )
    status = hp.hypergradient(task, hp.TreeCG(), hp.networks.Ring(4), key=0).status
    assert (status.converged, status.reason, status.residual, status.moved) == (False, "ill-posed", None, None)


def test_peers_that_look_at_no_curvature_find_out_whether_they_agree():
    problem = Regression()
    task, method = problem.task, hp.HGP(30, 10, 0.1)
    for apart, reason in [(0.1, "unsolved"), (0.005, "fixed-length")]:
        params = problem.solution * (1 + apart * np.arange(CLIENTS)[:, None])
        at = task.at(params=params)
        states = HypergradientState(at.params, at.hypers, jnp.zeros(CLIENTS))
        program = append_disagreement(method.bind(RING).program(at.problem))
        found = hp.Simulate().run(program, RING, states, at.data, jax.random.key(0)).states.report.status()
        assert found.disagreement == pytest.approx(problem.judged(params)[1])
        assert (found.reason, found.residual, found.moved) == (reason, None, None)


class Alone(Regression):
    """The same clients with separate solutions."""

    def __init__(self):
        super().__init__()
        pulls = np.einsum("kmi,km->ki", self.rows, self.labels) / EXAMPLES
        self.solutions = np.linalg.solve(self.hessians, pulls[..., None])[..., 0]

    def values(self, params):
        """Return every client's hypergradient through its own Hessian."""
        misses = np.einsum("kmi,ki->km", self.validation, params) - self.held_out
        source = np.einsum("kmi,km->ki", self.validation, misses) / EXAMPLES
        return -self.weight * np.sum(params * np.linalg.solve(self.hessians, source[..., None])[..., 0], axis=1)

    def judged_alone(self, params):
        """Return (residual, moved) as root mean squares over clients."""
        away = np.linalg.norm(params - self.solutions, axis=1) / np.linalg.norm(params, axis=1)
        here, there = self.values(params), self.values(self.solutions)
        return np.sqrt(np.mean(away**2)), np.linalg.norm(here - there) / np.linalg.norm(there)


def test_clients_that_train_alone_are_judged_by_their_own_solutions():
    problem = Alone()
    found = []
    for steps in (5, 40, 400):
        trained = hp.train(problem.task, hp.LocalSGD(steps, 0.2), RING, key=0)
        residual, moved = problem.judged_alone(np.asarray(trained.params))
        assert trained.status.residual == pytest.approx(residual, rel=0.01, abs=1e-9)
        assert trained.status.disagreement is None
        assert trained.status.converged == (True if residual <= 2e-4 else None if residual <= 0.02 else False)
        status = hp.hypergradient(trained.task, hp.hypergradients.LocalGradient(), RING, key=0).status
        assert status.residual == pytest.approx(residual, rel=0.01, abs=1e-9)
        if status.moved is not None:
            assert status.moved == pytest.approx(moved, rel=0.01)
        assert status.converged == (residual <= 0.1 and moved <= 0.03)
        found.append(status.converged)
    assert found[0] is False
    assert found[-1] is True


def test_nested_algorithms_of_clients_alone_are_judged_by_their_own_solutions():
    problem = Alone()
    outer, estimator = hp.optimizer("sgd", learning_rate=1e-6), hp.hypergradients.LocalGradient()
    for steps, good in ((3, False), (400, True)):
        method = hp.PDBO(hp.LocalSGD(steps, 0.2), estimator, outer, steps=2)
        assert hp.solve(problem.task, method, RING, key=0).status.converged is good


def hidden_system(least, part):
    """Return heterogeneous clients with one weak direction, and this part of the outer gradient along it."""
    random, d = np.random.default_rng(1), 8
    basis = np.linalg.qr(random.normal(size=(d, d)))[0]
    noise = 0.2 * random.normal(size=(6, d, d))
    noise += noise.transpose(0, 2, 1)
    mean = basis @ np.diag([least, *np.linspace(0.5, 2, d - 1)]) @ basis.T
    sources = random.normal(size=(6, d))
    sources -= (1 - part) * (sources.mean(0) @ basis[:, 0]) * basis[:, 0]
    return System(mean + noise - noise.mean(0), sources, random.normal(size=(6, 3, d)), random.normal(size=(6, 3)))


@pytest.mark.parametrize("method", [hp.TrackedHGP(), hp.Automatic(trust=False)], ids=type)
def test_estimates_that_overlook_a_weak_direction_are_compared_with_tree_cg(method):
    """Tracked steps miss a direction along which the outer gradient is zero, and report *converged*."""
    network, own = hp.networks.RandomDirected(6), []
    for loss in (0.0, 0.2):
        engine = hp.Simulate(faults=hp.Faults(loss=loss) if loss else None)
        for least in (0.0, 1e-9, 0.3):
            problem = hidden_system(least, 0.0)
            found = hp.hypergradient(problem.task, method, network, key=0, engine=engine)
            right = least > 0 and problem.error(found.value) < 1e-3
            assert found.status.converged is right
            own.append(right)
    assert own == [False, False, True] * 2


@pytest.mark.parametrize(
    ("solver", "good"), [(hp.SGP(15, 0.1), False), (hp.SGP(300, 0.1), True), (hp.TreeNewton(), True)]
)
@pytest.mark.long
def test_the_last_inner_solve_is_judged_which_gives_the_reported_params(solver, good):
    """The penalty falls in the only outer step, so that 15 steps no longer solve the inner problem."""
    problem = Regression()
    task = problem.task.replace(outer_on="train").at(hypers=np.full(CLIENTS, 2.0))
    method = hp.PDBO(solver, hp.TreeCG(), hp.optimizer("sgd", learning_rate=50.0), steps=1)
    found = hp.solve(task, method, hp.networks.FullyConnected(CLIENTS), key=0)
    weight = np.exp(np.asarray(found.hypers)).mean()
    assert weight < 0.5
    hessian = problem.hessians.mean(0) + (weight - problem.weight) * np.eye(SIZE)
    solution = np.linalg.solve(hessian, (problem.hessians.mean(0)) @ problem.solution)
    params = np.asarray(found.params)
    off = np.linalg.norm(params - solution, axis=1).max() / np.linalg.norm(params[0])
    assert (off < 1e-6) == good
    assert (found.status.converged, found.status.reason) == (good, "tolerance" if good else "unsolved")
    if not good:
        assert found.status.residual == pytest.approx(off, rel=0.1)


@pytest.mark.long
def test_a_tracked_estimate_is_compared_with_tree_cg_at_the_end_of_an_algorithm():
    for least, reason in ((1e-7, "inaccurate"), (0.3, "tolerance")):
        problem = hidden_system(least, 0.0)
        outer = hp.optimizer("sgd", learning_rate=1e-3)
        method = hp.PDBO(hp.TreeNewton(), hp.TrackedHGP(), outer, steps=1)
        found = hp.solve(problem.task, method, hp.networks.RandomDirected(6), key=0)
        moved = np.asarray(found.hypers) / -1e-3
        assert (problem.error(moved) < 1e-3) == (reason == "tolerance")
        assert (found.status.converged, found.status.reason) == (reason == "tolerance", reason)
