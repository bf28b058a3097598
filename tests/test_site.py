"""The site sets indices in plain text as subscripts, and leaves names of code unchanged."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
SOURCE = Path(__file__).parents[1] / "docs/_ext/subscripts.py"


@pytest.fixture(scope="module")
def pieces():
    spec = importlib.util.spec_from_file_location("subscripts", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pieces


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("f_i(x, λ_i) and F̄_k.", "f[i](x, λ[i]) and F̄[k]."),
        ("∂²_xx f_k, δ_{j→i}(t), λ_max", "∂²[xx] f[k], δ[j→i](t), λ[max]"),
        ("qᵀH_k q − v_iᵀd_i, deg_i", "qᵀH[k] q − v[i]ᵀd[i], deg[i]"),
        ("big_fed l2_rate n_jobs x__y a_b_c hp.n_x", "big_fed l2_rate n_jobs x__y a_b_c hp.n_x"),
    ],
)
def test_indices_are_lowered(pieces, text, shown):
    assert "".join(f"[{part}]" if index else part for part, index in pieces(text)) == shown
