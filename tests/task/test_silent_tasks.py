"""Tasks that would silently give wrong numbers are refused, and similar valid tasks are accepted."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.extend import Number, as_number

NETWORK = hp.networks.FullyConnected(3)
ROWS = [np.arange(1.0, 2 + 2 * k, dtype=np.float32) for k in range(3)]  # one, three and five records


def squares(x, hyper, a):
    return (x - a) ** 2


def centered(x, hyper, a):
    return (x * (a - jnp.mean(a)) - 1) ** 2


def squeezed(x, hyper, a):
    return jnp.squeeze(x * jnp.ones((len(a), 1)) - a[:, None], axis=1) ** 2


def make(inner=squares, outer=squares, train=ROWS, validation=ROWS, **options):
    return hp.Task(inner=inner, outer=outer, **{"params": 0.0, "hypers": 0.0, **options}, train=train,
                   validation=validation)  # fmt: skip


def test_a_loss_with_the_mean_of_a_batch_is_refused_where_clients_differ_in_size():
    for level in ("inner", "outer"):
        with pytest.raises(hp.InvalidInput, match=rf"task\.{level}: got 'a cost whose loss of one example depends"):
            make(**{level: centered}).check()
    full = np.ones((3, 4), np.float32) * np.arange(4)
    make(inner=centered, train=full, validation=full).check()  # without padding it has the same meaning everywhere
    whole = hp.Batch.cost(lambda x, hyper, batch: batch.mean((x * (batch.examples - batch.mean(batch.examples))) ** 2))
    make(inner=whole).check()


def test_losses_of_single_records_pass_whatever_clients_own():
    make(inner=squeezed).check()
    make(train=[rows[:1] for rows in ROWS[:2]] + [ROWS[2]]).check()
    by_example = make(inner=lambda x, w, a: jnp.exp(w) * (x - a) ** 2, hypers=hp.per_example(ROWS, start=0.5))
    by_example.check()


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16])
def test_params_of_sixteen_bits_are_refused_in_one_line(kind):
    name = jnp.dtype(kind).name
    with pytest.raises(hp.InvalidInput, match=f"params: got 'numbers of type {name}'; allowed: float32"):
        make(params=jnp.zeros(2, kind), inner=lambda x, h, a: (x[0] - a) ** 2).check()
    with pytest.raises(hp.InvalidInput, match="hypers: got"):
        make(hypers=jnp.zeros((), kind)).check()


def test_a_task_cannot_be_written_to():
    given = np.tile(np.arange(64.0, dtype=np.float32), (3, 16, 1)).reshape(3, -1)
    task = make(
        params={"x": jnp.zeros(())}, inner=lambda x, h, a: (x["x"] - a) ** 2, outer=lambda x, h, a: (x["x"] - a) ** 2,
        train=given, validation=given,
    )  # fmt: skip
    before = np.array(task.train)
    for write in (lambda: setattr(task, "inner", squares), lambda: delattr(task, "inner")):
        with pytest.raises(hp.InvalidInput, match=r"task\.inner"):
            write()
    task.params["x"] = jnp.ones(3)
    task.data.sets["train"] = None
    given[:] = 7
    np.testing.assert_array_equal(task.params["x"], 0)
    np.testing.assert_array_equal(task.train, before)


def test_a_private_task_stays_private():
    task = make(train=np.ones((3, 4), np.float32), validation=np.ones((3, 4), np.float32))
    private = task.private(clip=1.0, noise=hp.privacy.Gaussian(2.0))
    with pytest.raises(hp.InvalidInput, match=r"task\.privacy: got None"):
        private.replace(privacy=None)
    with pytest.raises(hp.InvalidInput, match="elsewhere on a private task"):
        private.at(params=np.zeros(3, np.float32))
    trained = hp.train(private, hp.SGP(2, 0.1), NETWORK, key=0).task
    with pytest.raises(hp.InvalidInput, match=r"task\.spent: got None"):
        trained.replace(spent=None)
    again = hp.train(trained, hp.SGP(2, 0.1), NETWORK, key=1)
    assert again.privacy.releases == {"train": 4}


class Branching(hp.extend.InnerSolver):
    """Solver that branches in Python on a traced number."""

    info = hp.SGP.info
    rate: Number = eqx.field(converter=as_number, default=1.0)

    def program(self, problem):
        sign = 1 if self.rate > 0.5 else -1
        move = lambda state, ctx: eqx.tree_at(lambda s: s.params, state, state.params + sign)  # noqa: E731
        return hp.programs.Local(move)


@pytest.mark.parametrize("engine", [hp.Simulate(), hp.Threads()], ids=type)
def test_a_branch_on_a_traced_number_is_refused(engine):
    full = jax.numpy.ones((3, 4))
    with pytest.raises(hp.InvalidInput, match=r"Branching: got 'a branch in Python.*jnp\.where"):
        hp.train(make(train=full, validation=full), Branching(0.1), NETWORK, key=0, engine=engine)
