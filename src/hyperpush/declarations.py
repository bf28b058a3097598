"""What each method declares: where it runs, what it estimates and what it sends."""

from hyperpush.estimators.alone import DirectGradient, LocalGradient
from hyperpush.estimators.directed_rb import DirectedRB
from hyperpush.estimators.exact_rb import ExactRB
from hyperpush.estimators.hgp import HGP
from hyperpush.estimators.state import Declaration
from hyperpush.estimators.tracked import TrackedHGP
from hyperpush.estimators.vr_hgp import VRHGP

METHODS: dict[str, Declaration] = {
    method.__name__: method.declares
    for method in (HGP, TrackedHGP, DirectedRB, VRHGP, ExactRB, LocalGradient, DirectGradient)
}
