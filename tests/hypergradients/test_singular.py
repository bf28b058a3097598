"""Singular and indefinite Hessians: the verdicts of estimators compared with eigendecompositions in NumPy."""

from functools import partial

import jax
import numpy as np
import pytest
from systems import System, relative_error

import hyperpush as hp

CLIENTS, SIZE, DAMPING = 3, 6, 0.1
known = hp.hypergradients
METHODS = {
    "Dense": known.Dense,
    "ImplicitCG": partial(known.ImplicitCG, 50),
    "LocalGradient": partial(known.LocalGradient, 50),
    "ClientGradient": partial(known.ClientGradient, 50),
    "TreeCG": hp.TreeCG,
}
SPECTRA = {
    "regular": np.linspace(1, 3, SIZE),
    "consistent": np.array([0, 0, 1, 1.5, 2, 3]),
    "outside": np.array([0, 0, 1, 1.5, 2, 3]),
    "indefinite": np.array([-1, 0.5, 1, 1.5, 2, 3]),
    "nearly": np.geomspace(1e-14, 1, SIZE),
}
REFUSE, LEAST, DAMPED = {}, {"singular": "minimum-norm"}, {"damping": DAMPING}
# The settings that converge, by spectrum; all others are refused.
CONVERGE = {
    "regular": [REFUSE, LEAST, DAMPED],
    "consistent": [LEAST, DAMPED],
    "outside": [DAMPED],
    "indefinite": [],
    "nearly": [DAMPED],
}


class Case:
    """Quadratics whose mean Hessian, or each client's own Hessian, has these eigenvalues."""

    def __init__(self, kind, local):
        rng, self.values, self.local = np.random.default_rng(5), SPECTRA[kind], local
        count = CLIENTS if local else 1
        self.bases = np.linalg.qr(rng.normal(size=(count, SIZE, SIZE)))[0]
        hessians = np.einsum("kij,j,klj->kil", self.bases, self.values, self.bases)
        if not local:
            noise = rng.normal(size=(CLIENTS, SIZE, SIZE))
            noise = noise + noise.transpose(0, 2, 1)
            hessians = hessians + noise - noise.mean(0)  # the mean is singular, but no client's own Hessian is
        shapes = (CLIENTS, 4, SIZE), (CLIENTS, SIZE), (CLIENTS, 4)
        couplings, sources, direct = (rng.normal(size=shape) for shape in shapes)
        if kind == "consistent":
            null = self.bases[..., self.values == 0]
            sources = sources - np.einsum("kij,klj,kl->ki", null, null, np.broadcast_to(sources, (CLIENTS, SIZE)))
        self.parts = System(hessians, sources, couplings, direct)

    def truth(self, name, damping=0.0):
        """Return the direct gradient minus B_i times the minimum-norm or the damped solution.

        The outer cost is the client's own, or the mean of all clients; a client's B_i counts 1/n in a shared inner
        problem.
        """
        own = name in ("LocalGradient", "ClientGradient")
        values = self.values + damping
        inverse = np.where(values == 0, 0, 1 / np.where(values == 0, 1, values))
        sources = self.parts.sources if own else self.parts.sources.mean(0, keepdims=True)
        sources = sources / (1 if self.local else CLIENTS)
        q = np.einsum("kij,j,klj,kl->ki", self.bases, inverse, self.bases, sources)
        return self.parts.direct / (1 if own else CLIENTS) - np.einsum(
            "nmd,nd->nm", self.parts.couplings, np.broadcast_to(q, (CLIENTS, SIZE))
        )


def estimate(case, method, dtype, **options):
    with jax.enable_x64(dtype == "float64"):
        return hp.hypergradient(case.parts.task, method, hp.networks.FullyConnected(CLIENTS), key=0, **options)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [REFUSE, LEAST, DAMPED], ids=["refuse", "minimum-norm", "damping"])
@pytest.mark.parametrize("name", METHODS)
def test_systems_that_have_no_answer_are_not_passed_off_as_solved(name, options, dtype):
    method = METHODS[name](**options)
    for kind in SPECTRA:
        case = Case(kind, local=name == "LocalGradient")
        found = estimate(case, method, dtype)
        assert np.all(np.isfinite(found.value)), kind
        assert found.status.singular == ("damping" if options == DAMPED else options.get("singular", "refuse"))
        assert found.status.converged is (options in CONVERGE[kind]), (kind, found.status)
        if options in CONVERGE[kind]:
            error = relative_error(found.value, case.truth(name, options.get("damping", 0.0)))
            assert error < (1e-6 if dtype == "float64" else 1e-3), kind
            assert found.status.error is not None
            assert error <= found.status.error < 0.01, kind
        elif kind != "nearly":
            assert found.status.reason == "ill-posed", kind
            assert found.status.error is None


@pytest.mark.parametrize("name", METHODS)
def test_an_eigenvector_as_outer_gradient_hides_nothing(name):
    """Conjugate gradients on an eigenvector alone would end after one step and see only one eigenvalue."""
    case = Case("outside", local=name == "LocalGradient")
    case.parts = case.parts._replace(sources=np.broadcast_to(case.bases[..., -1], (CLIENTS, SIZE)))
    assert estimate(case, METHODS[name](), "float64").status.reason == "ill-posed"
    found = estimate(case, METHODS[name](**LEAST), "float64")
    assert found.status.converged
    assert relative_error(found.value, case.truth(name)) < 1e-6


@pytest.mark.parametrize("name", ["ImplicitCG", "LocalGradient", "ClientGradient", "TreeCG"])
@pytest.mark.long
def test_too_few_steps_are_a_limit(name):
    case = Case("regular", local=name == "LocalGradient")
    found = estimate(case, getattr(known, name)(steps=3), "float64")
    assert (found.status.converged, found.status.reason) == (False, "limit")
    assert found.status.error is not None
    assert found.status.error > relative_error(found.value, case.truth(name)) > 1e-5


def test_throw_raises():
    with pytest.raises(hp.NotConverged, match="singular or indefinite"):
        estimate(Case("outside", local=False), known.Dense(), "float32", throw=True)


@pytest.mark.parametrize("name", METHODS)
def test_the_choice_and_the_damping_must_agree(name):
    with pytest.raises(hp.InvalidInput, match=rf"{name}\.damping: got 0\.0; allowed: a number above 0"):
        METHODS[name](singular="damping")
    with pytest.raises(hp.InvalidInput, match=rf"{name}\.damping: got 0\.1; allowed: 0 for singular"):
        METHODS[name](singular="minimum-norm", damping=0.1)
    with pytest.raises(hp.InvalidInput, match=rf"{name}\.singular"):
        METHODS[name](singular="ignore")
    assert METHODS[name](singular="damping", damping=0.1).damping == 0.1
